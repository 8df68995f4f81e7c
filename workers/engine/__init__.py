"""The reference engine: a serving process that speaks vLLM's HTTP dialect. Start with `engine.py`."""
