"""What ends, pauses or changes trials before their budget, and sweeps before theirs."""
