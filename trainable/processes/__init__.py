"""The processes that train: of a trial and its ranks, started or forked."""
