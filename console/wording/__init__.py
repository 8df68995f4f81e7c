"""Words of pages that no decision says: what a record changed, what an engine was started with."""
