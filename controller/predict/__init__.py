"""The predictions behind decisions: step latency, output length, prompt length."""
