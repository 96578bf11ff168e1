"""What to try, and when: spec, search space, ledger, search, schedulers, running a sweep, and the
command line.
"""

import os

from sweeps.account import complete_account

# Ray reads these when it is imported. Without the first it takes 127.0.0.1 for the machine's own
# address, and all of its servers listen to every network; without the second what it says, as of a
# lost worker, may come to a file or a pipe behind our own last line.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_FLUSH_DRIVER_LOGS"] = "1"
complete_account()
