"""A consumer that takes no messages any more begins anew.

Redis that dies between a message's arrival and its acknowledgement leaves Celery's consumer (5.7, prefetch of one) with
a message that it counts as its own for ever: it reads nothing more, and what reads nothing never hears that the
connection is gone. Such a worker looks well and does nothing until somebody restarts it.
"""

from __future__ import annotations

from typing import Any

import redis
from celery import bootsteps
from celery.worker import state

from workers.tasks.heartbeat import redis_client

LOOK_EVERY_S = 2.0
LOOKS = 3  # a worker that is well takes within milliseconds what waits; it is idle beside a queue once by chance


class TakesMessages(bootsteps.StartStopStep):
    """A part of the consumer: looks whether it is idle although messages wait for it, and then drops the connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._timer: Any = None
        self._seen = 0

    def start(self, parent: Any) -> None:
        self._seen = 0
        queues = sorted(parent.app.amqp.queues.consume_from)
        self._timer = parent.timer.call_repeatedly(LOOK_EVERY_S, self.look, (queues,))

    def stop(self, parent: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self, queues: list[str]) -> None:
        """Raises ConnectionError; the worker's loop takes it for the loss of a connection and makes another."""
        self._seen = self._seen + 1 if self._left_lying(queues) else 0
        if self._seen >= LOOKS:
            raise ConnectionError(f"messages wait in {', '.join(queues)} and are not taken")

    def _left_lying(self, queues: list[str]) -> bool:
        if state.reserved_requests or state.active_requests:
            return False
        try:
            return any(redis_client().llen(queue) for queue in queues)
        except redis.RedisError:
            return False
