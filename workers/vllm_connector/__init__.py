"""Slackline's KV connector for vLLM: `"kv_connector_module_path": "workers.vllm_connector.connector"`.

KV goes by TCP from the vLLM that prefills to the one that decodes, and the transfer daemon of the sender's host
(`workers/flowd`) says when. It runs in vLLM's environment: nothing here imports Django, Celery or an HTTP client, and
only `connector.py` and `stats.py` import vLLM. See docs/how-to/disaggregate.md.

`plan.py`: which KV is offered and loaded, in vLLM's scheduler. `transfers.py`: the thread that moves it, in vLLM's
worker, with `source.py` (the side that sends) and `pull.py` (the side that loads) on its event loop.
"""
