"""The combined policy set `slackline` on each paper's workload."""
