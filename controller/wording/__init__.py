"""Decisions in plain English: reasons, figures and sentences, said here once for page, log, client and export."""
