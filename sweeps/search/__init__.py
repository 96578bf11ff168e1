"""Choose the parameters of the next trial: the searcher between ledger and Ray, and samplers."""
