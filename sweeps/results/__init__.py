"""Status, results and comparison of sweeps: read from their files, and shown as text."""
