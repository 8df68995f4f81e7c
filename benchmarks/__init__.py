"""One program for each `make bench-NAME`: bench_NAME.py. Its parts, if it has more than one file, are in the folder of
that name; what several programs share is in `load`, `servers`, `machine` and `torch`."""
