"""Run a sweep: launch, driver, stop, sync."""
