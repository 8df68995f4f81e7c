"""The machine that a benchmark runs on: its name, its processor time, and a second host behind a limited link."""
