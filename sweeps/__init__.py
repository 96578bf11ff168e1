"""Hyperparameter sweeps: spec, search, ledger, early stopping, driver, results, command line."""

from sweeps.account import complete_account
from sweeps.engine.ray_compat.environment import set_import_env

set_import_env()  # Ray reads these variables when it is imported
complete_account()
