"""What `bench_attacks` and tests of the servers do to them: raw sockets, fleet tokens, the console."""
