"""The record: which trials exist, their parameters, values, states and attempts."""
