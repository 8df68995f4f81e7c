"""Prefill and decode on separate instances: where a decode stage runs, and the life of each KV transfer."""
