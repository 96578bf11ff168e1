"""The driver: the process that locks a sweep, runs its trials, records them and finalizes."""
