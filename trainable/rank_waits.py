"""For how many seconds the ranks of a trial wait: for each other, and for each other's processes.

What must not live here: waiting.
"""

from __future__ import annotations

WITHOUT_END = 365 * 24 * 3600.0
"""While one rank works alone, or the driver decides."""
JOIN = 120.0
"""Without Ray, until all ranks have joined, opened the run and begun its first report."""
JOIN_SWEEP = 600.0
"""The same in a sweep, as the driver waits for a trial that opens its run."""
CONNECT = 60.0
"""Until the ranks, which have just met, have connected to a further group."""
ARRIVAL_PROBE = 0.1
"""While a rank has not come to the group, between two looks whether one has ended."""
STEP = 1800.0
"""In a step of a sweep, unless `failures.step_timeout` says otherwise; as long as gloo waits by
default. A rank may save while the others wait."""
STEP_ALONE = 7 * 24 * 3600.0
"""In a step without Ray: a user may debug one of the ranks. The end of a process is noticed at
once."""
END = 2.0
"""After a rank is lost, until its process is found dead, or its error arrives."""
END_ALONE = 1.0
"""The same without Ray."""
LEAVE = 5.0
"""Until the other ranks have ended a run which the first has left."""
LOOP_PROBE = 1.0
"""On a rank whose own loop has failed, for a sign that another one has ended."""
LOOP_CAUSE = 10.0
"""On such a rank, for the reason of one that failed before it."""
