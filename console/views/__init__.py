"""Pages: one family of pages a file. Views translate; selectors read and services write."""
