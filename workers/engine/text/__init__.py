"""Tokens and text: tokenizers, and what an emulated model says."""
