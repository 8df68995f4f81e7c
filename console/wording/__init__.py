"""Sentences and names: decisions, reasons and figures in plain English."""
