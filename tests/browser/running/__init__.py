"""What runs beneath the pages: the whole of `make up`, callers without a browser, a gateway with a long queue."""
