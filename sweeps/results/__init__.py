"""What a sweep has come to, read from its owners of truth, and how it is shown."""
