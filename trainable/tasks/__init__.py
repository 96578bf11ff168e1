"""Built-in tasks: small, real, and quick enough to learn the platform with."""
