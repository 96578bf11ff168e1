"""What is watched of a run: heartbeat, health, norms."""
