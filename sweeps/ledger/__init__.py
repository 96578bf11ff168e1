"""Store and read a sweep's trials: parameters, values, states and attempts."""
