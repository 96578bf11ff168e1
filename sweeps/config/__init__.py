"""What a sweep is: the spec, its checks, its search space, its way from YAML and back."""
