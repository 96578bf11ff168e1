"""What a sweep's trials and their runs lack, and its repair."""
