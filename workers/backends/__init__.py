"""The gateway's async adapters to engines: one module for each kind, chosen by the `backend` of an instance."""
