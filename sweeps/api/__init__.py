"""Sweeps from Python: `from sweeps import Sweep`.

What must not live here: anything that only the command line needs (`cli`).
"""
