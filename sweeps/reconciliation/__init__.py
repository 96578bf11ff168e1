"""Compare the states of ledger, store and tracking, and repair what is wrong."""
