"""Async adapters to serving engines: one file an engine, chosen by the `backend` name of an instance."""
