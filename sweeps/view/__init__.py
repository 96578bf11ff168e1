"""Read a sweep."""
