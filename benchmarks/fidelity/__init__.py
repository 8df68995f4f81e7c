"""`make fidelity`: the simulator against real vLLM servers."""
