"""Real vLLM servers for benchmarks and tests, and what `make bench-vllm` compares."""
