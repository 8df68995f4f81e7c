"""Forms of the console: they validate input before a service is called; every error belongs to a field."""
