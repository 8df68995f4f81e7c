"""Processes beside the gateway: Celery and its tasks, the reference engine, backends, provisioners, the supervisor."""
