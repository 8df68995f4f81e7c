"""KV transfers between engines: links, the wire protocol, and both sides of a transfer."""
