"""What a sweep hands out: weights with their card, the registry, pictures, the report."""
