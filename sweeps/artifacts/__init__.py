"""What a sweep stores beside its figures: exports, cards, registered models."""
