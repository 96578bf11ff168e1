"""How members of a population copy each other: whom, with what, and the links on disk."""
