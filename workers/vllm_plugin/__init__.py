"""Slackline's scheduler for a vLLM server: `--scheduler-cls workers.vllm_plugin.scheduler.SlacklineScheduler`.

It orders vLLM's own waiting queue, and chooses who decodes, by the policies of `controller/policies`, the same code
that runs in the gateway, the reference engine and the simulator. It runs in vLLM's environment: nothing here imports
Django, Celery or an HTTP client, and only `scheduler.py` imports vLLM. See docs/how-to/use-the-vllm-plug-in.md.
"""
