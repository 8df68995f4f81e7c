"""Writes of what happened: finished requests, KV transfers, queue commands, refused calls; retention."""
