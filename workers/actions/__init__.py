"""Actions on instances that take longer than one request: weight loads, sleep, wake, role switches. Also KV links."""
