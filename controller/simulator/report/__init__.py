"""Results of a simulation: records, summaries, tables, charts and pages."""
