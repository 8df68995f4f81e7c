"""What CALM inside the engine (a batching) and in the gateway (an ordering) share: columns, window, cutoff."""
