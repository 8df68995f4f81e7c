"""The control API under /api/v1, on Django REST framework: one resource a file, named as in its URL, and `urls`."""
