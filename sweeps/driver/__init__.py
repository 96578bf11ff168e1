"""The process that runs a sweep: its lock, its one operation, its bookkeeping, its ways to end."""
