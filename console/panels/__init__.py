"""What one panel of a page shows, gathered from selectors."""
