"""Live state of the gateways, shaped for pages and browsers."""
