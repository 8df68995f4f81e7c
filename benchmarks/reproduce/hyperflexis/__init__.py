"""HyperFlexis' figures."""
