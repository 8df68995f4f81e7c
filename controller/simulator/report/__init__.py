"""What a simulation found: results, summaries, tables, charts and pages."""
