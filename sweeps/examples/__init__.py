"""The example sweeps that ship with the project."""
