"""What people type into the console, checked before a service sees it; every error names its field."""
