"""What of a trial tracking is given: its curve, its tags."""
