"""KV transfers between engines: kept links, the wire protocol, both ends of a transfer."""
