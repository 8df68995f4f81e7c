"""FlowPrefill's figures."""
