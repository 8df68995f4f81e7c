"""The gateway's part of disaggregated serving: prefill and decode calls of one request, and its KV transfer."""
