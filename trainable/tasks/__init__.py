"""Built-in tasks: small, real and quick, for first steps."""
