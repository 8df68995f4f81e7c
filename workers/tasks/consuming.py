"""Reconnects a Celery consumer that has stopped taking messages.

If Redis dies between the delivery of a message and its acknowledgement, Celery's consumer (5.7, prefetch of one) counts
that message as unacknowledged forever. It then reads no more messages, so it never notices that its connection is
closed, and the worker looks healthy but does nothing until it is restarted.
"""

from __future__ import annotations

from typing import Any

import redis
from celery import bootsteps
from celery.worker import state

from workers.tasks.heartbeat import redis_client

LOOK_EVERY_S = 2.0
# A healthy worker takes a waiting message within milliseconds, so it is idle beside a full queue at most once by
# chance.
LOOKS = 3


class StalledConsumer(bootsteps.StartStopStep):
    """A step of Celery's consumer: drops the connection if the consumer is idle although messages wait."""

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
        """Raises ConnectionError if the consumer has stalled; the worker's loop then reconnects."""
        self._seen = self._seen + 1 if self._idle_beside_messages(queues) else 0
        if self._seen >= LOOKS:
            raise ConnectionError(f"messages wait in {', '.join(queues)} and are not taken")

    def _idle_beside_messages(self, queues: list[str]) -> bool:
        if state.reserved_requests or state.active_requests:
            return False
        try:
            return any(redis_client().llen(queue) for queue in queues)
        except redis.RedisError:
            return False
