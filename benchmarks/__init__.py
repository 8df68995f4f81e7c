"""One program for each `make bench-NAME` (bench_NAME.py), and what several of them share."""
