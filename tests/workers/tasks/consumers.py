"""What of a Celery worker's consumer its steps see."""

from types import SimpleNamespace


class Consumer:
    """Its timer keeps what it was given."""

    def __init__(self, *queues):
        self.app = SimpleNamespace(amqp=SimpleNamespace(queues=SimpleNamespace(consume_from=dict.fromkeys(queues))))
        self.timer = self
        self.calls, self.cancelled = [], 0

    def call_repeatedly(self, seconds, work, args):
        self.calls.append((seconds, work, args))
        return self

    def cancel(self):
        self.cancelled += 1
