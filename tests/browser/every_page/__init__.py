"""What holds for every page, and the tables of pages and actions."""
