"""The PyTorch executor: a real transformer behind the engine's step interface. The only place that imports torch."""
