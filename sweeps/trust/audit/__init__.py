"""The audit of a sweep: cards that say whether its result can be trusted."""
