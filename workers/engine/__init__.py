"""The reference engine: a serving process with vLLM's HTTP interface. Start reading with `engine.py`."""
