"""What a run keeps, and where: checkpoints' parts, rows, notes; local files and object stores."""
