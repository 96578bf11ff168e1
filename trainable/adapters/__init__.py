"""Adapters to training frameworks: each module needs the framework's own package.

What must not live here: anything that the rest of `trainable` imports.
"""
