"""The gateway: OpenAI's API over the scheduler, raw ASGI, async end to end. Start with app.py, then runtime.py."""
