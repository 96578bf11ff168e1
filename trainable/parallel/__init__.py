"""The ranks of a trial: what they exchange and compare, and models that are sharded over them."""
