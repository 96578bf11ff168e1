"""What the owners of truth say, what of it is wrong, and putting it right."""
