"""The PyTorch executor: a real transformer behind the engine's step interface. Only this package imports torch."""
