"""The parts of bench-scaleout: the raw bandwidth of its medium, and its report."""
