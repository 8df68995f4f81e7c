"""Tokens and text: tokenizers, streams of text, and the text of emulated models."""
