"""Published results of a sweep: exported weights, model card, registry, figures, report."""
