"""What stops, pauses or changes trials before their budget."""
