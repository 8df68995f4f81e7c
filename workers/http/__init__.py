"""What every HTTP server of Slackline shares: its limits, and the protocol and wrapper that keep them."""
