"""Celery tasks: load, call a service, return. One area a file; the schedule is in `workers/celery.py`."""
