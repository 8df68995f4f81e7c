"""Words of pages that no decision says: how a request was judged, what an engine was started with."""
