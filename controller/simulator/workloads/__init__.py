"""What arrives in a simulation: arrivals, lengths, targets, and programs of several calls."""
