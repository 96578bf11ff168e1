"""Which point the next trial gets: the searcher between ledger and Ray, and the samplers."""
