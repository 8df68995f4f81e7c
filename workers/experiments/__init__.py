"""Experiments carried out by the analysis worker, and what they run on."""
