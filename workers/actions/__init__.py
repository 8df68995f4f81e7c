"""Orders to instances that take more than a moment: load weights, sleep, wake, change role, keep links."""
