"""The configuration of a sweep: the spec, its checks, its search space, reading and writing."""
