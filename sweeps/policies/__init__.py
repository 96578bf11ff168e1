"""What ends a sweep before its trials are spent: repeated failures, and its stop criteria."""
