"""Real vLLM servers for benchmarks and tests, and the contents of `make bench-vllm`."""
