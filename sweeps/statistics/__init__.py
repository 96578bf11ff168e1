"""Statistics of sweeps: pure functions on numbers, each with the source of its formula.

What must not live here: specs, the ledger, files, and sentences for users (`trust`, `report`).
"""
