"""What `bench-gating` and its stories run: engines on two sides of a link, and what they are asked."""
