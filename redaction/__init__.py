"""What may be shown of text: without secrets (`secrets`), without control characters (`escapes`).

Both other libraries use it, and so do the commands. What must not live here: files, and anything
that is not in Python's own library.
"""
