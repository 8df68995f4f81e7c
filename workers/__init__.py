"""Processes beside the gateway: Celery and its tasks, engines, adapters, provisioners, the supervisor."""
