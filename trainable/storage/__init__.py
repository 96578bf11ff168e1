"""Store the checkpoints of a run: in a directory, or in an object store."""
