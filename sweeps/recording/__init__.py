"""Choose what the tracking server receives of a trial: its thinned curve, its tags."""
