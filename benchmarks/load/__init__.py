"""Requests sent on time to a running gateway, and what became of them: plans, runs, scores, the search for the knee."""
