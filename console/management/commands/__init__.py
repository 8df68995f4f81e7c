"""One `manage.py` command a file."""
