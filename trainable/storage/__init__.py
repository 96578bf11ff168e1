"""Where the checkpoints of a run lie: in a directory, or in an object store."""
