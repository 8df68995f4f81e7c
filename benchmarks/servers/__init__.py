"""What a benchmark starts: engines, the random models that they run, and a gateway with PostgreSQL and Redis."""
