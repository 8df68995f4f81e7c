"""Celery tasks: each loads, calls a service and returns. One file for each area; the schedule is in
`workers/celery.py`."""
