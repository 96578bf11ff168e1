"""Hyperparameter sweeps: spec, search, ledger, early stopping, driver, results, command line."""

import os

from sweeps.account import complete_account

# Ray reads these on import. Without the first, Ray replaces 127.0.0.1 by the machine's address,
# and its servers listen on every network. Without the second, Ray's messages, such as that of a
# lost worker, may reach a file or pipe after the command's last line.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_FLUSH_DRIVER_LOGS"] = "1"
complete_account()
