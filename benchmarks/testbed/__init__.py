"""Hosts in network namespaces on one switch: emulated prefills whose bytes are really sent (`make bench-testbed`)."""
