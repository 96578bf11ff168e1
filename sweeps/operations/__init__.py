"""What can be done with a sweep, one function each: run, resume, stop, deliver, export, remove.

The command line and the Python API call these functions, and reach no layer below them themselves;
what they read comes from `results`. What must not live here: printing, and exit codes.
"""
