"""An engine's weights: whether they are there, where they come from, copies in host memory."""
