"""Example sweeps that are installed with the package."""
