"""The data path: OpenAI's API over the dispatcher, raw ASGI, async end to end. Start with app.py, then runtime.py."""
