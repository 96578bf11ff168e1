"""Statistics as pure functions of numbers; each docstring names the source of its formula.

What must not live here: the ledger, files, and words for users.
"""
