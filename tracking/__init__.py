"""Experiment tracking: recorders, the durable outbox, delivery to MLflow, and provenance."""
