"""What to try, and when: spec, search space, ledger, search, schedulers, running a sweep, and the
command line.
"""

import os

# Ray reads this when it is imported. Without it Ray takes 127.0.0.1 for the machine's own address,
# and all of its servers listen to every network.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
