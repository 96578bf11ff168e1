"""The user's code: how it is imported and called, and which files it has."""
