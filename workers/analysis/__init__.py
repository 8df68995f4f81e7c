"""What is learned from recorded requests, in the worker of the queue `analysis`."""
