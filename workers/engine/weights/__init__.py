"""An engine's weights: their state, their sources, copies in host memory, and the identity of checkpoints."""
