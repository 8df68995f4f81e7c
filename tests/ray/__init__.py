"""`make test-ray`: engines as jobs of a real Ray cluster on this machine, and its faults."""
