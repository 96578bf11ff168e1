"""Where trials run: local Ray or a cluster, worker processes, resources, task checks."""
