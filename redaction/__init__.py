"""Make text safe to show: remove secrets (`secrets.py`) and control characters (`escapes.py`).

`sweeps`, `trainable` and `tracking` use it. What must not live here: access to files, and imports
from outside the standard library.
"""
