"""What belongs to the site as a whole: error pages, health, metrics and the page of UI components."""
