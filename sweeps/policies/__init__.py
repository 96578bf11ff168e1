"""The policies that end a sweep early: repeated failures and stop criteria."""
