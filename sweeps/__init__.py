"""What to try, and when: spec, search space, ledger, search, schedulers, running a sweep, and the
command line.
"""
