"""Predictions that decisions rest on: step latency, output length, prompt length."""
