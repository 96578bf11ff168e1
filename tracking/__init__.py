"""What happened, for people: recorders, the durable outbox before MLflow, provenance."""
