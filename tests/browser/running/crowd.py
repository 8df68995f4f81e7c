"""A gateway with a long queue that always changes: `python -m tests.browser.running.crowd REDIS_URL ROWS`.

It is the real dispatcher, feed and board without a data path: requests arrive and are given up, none is ever sent.
With `--answer-after S` it also obeys commands and takes its time; it prints how many requests each was applied to.
With `--hang PID --at N` it obeys the Nth command and then stops that process, the Redis through which it should answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

import redis

from api.openai.state.queue_feed import QueueFeed
from controller.core import events as ev
from controller.core.messages import (
    COMMAND_CHANNEL,
    GATEWAYS_KEY,
    LIVE_QUEUE,
    CommandAnswer,
    CommandMessage,
    FleetMessage,
)
from controller.core.types import InstanceSpec, Request, Targets
from controller.dispatch import build_dispatcher
from workers.live import LiveState, LiveUnavailable, follow

NAME = "gateway-crowd"
MODEL = "crowd"
CLASSES = ("interactive", "analytics", "summaries")
TICK_S = 0.25
MOVES = 25  # of each kind in a tick: a hundred a second come, a hundred go
MINUTE_S = 60.0
FLEET_KEPT_S = 3.0


class Crowd:
    """A gateway without engines: its queue, and what it publishes and obeys."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.dispatcher, self.chance = build_dispatcher("slackline"), random.Random(7)
        self.board = LiveState(options.url, NAME)
        self.feed = QueueFeed(NAME, self.dispatcher, time.time() - time.monotonic())
        self.coming = self.arrivals()
        self.heard, self.tasks = count(1), set()
        self.answered = 0  # the newest request for the whole queue that was answered

    def arrivals(self) -> Iterator[ev.Arrived]:
        chance = self.chance
        for number in count():
            targets = Targets(chance.choice([200.0, 400.0, 900.0]), 0.1, None, 60 * MINUTE_S)  # none lapses in a test
            yield ev.Arrived(
                Request(
                    f"crowd-{number:06}", time.monotonic(), targets, chance.randint(10, 900), 100, MODEL,
                    tenant="crowd", slo_class=chance.choice(CLASSES),
                )
            )  # fmt: skip

    async def start(self) -> None:
        instance = InstanceSpec("busy-for-ever", MODEL, max_num_seqs=1)
        self.dispatcher.handle([ev.InstanceUp(instance)], time.monotonic())
        self.dispatcher.handle([next(self.coming) for _ in range(self.options.rows)], time.monotonic())
        await self.feed.start()
        redis.Redis.from_url(self.options.url).sadd(GATEWAYS_KEY, NAME)
        if self.options.answer_after is not None:
            self.tasks.add(
                asyncio.create_task(follow(self.board, self.obey, lambda version: None, lambda orders: None))
            )
            mine = COMMAND_CHANNEL.format(gateway=NAME)
            while not dict(redis.Redis.from_url(self.options.url).pubsub_numsub(mine))[mine.encode()]:
                await asyncio.sleep(0.01)

    def obey(self, message: CommandMessage) -> None:
        queue, asked = self.dispatcher.queue(), message["request_ids"]
        here = [each for each in asked if queue.row(each, 0.0) is not None]
        kind, priority = message["kind"], message["priority"]
        told = ev.Command(message["id"], message["actor"], kind, tuple(here), priority)  # type: ignore[arg-type]
        self.dispatcher.handle([told], time.monotonic())
        gone = [each for each in asked if each not in set(here)]
        print(len(here), flush=True)
        if next(self.heard) == self.options.at:
            os.kill(self.options.hang, signal.SIGSTOP)
        answer = CommandAnswer(command=message["id"], gateway=NAME, applied=here, gone=gone, too_late=[])
        self.tasks.add(asyncio.get_running_loop().create_task(self.say(answer)))

    async def say(self, answer: CommandAnswer) -> None:
        await asyncio.sleep(self.options.answer_after)
        with suppress(LiveUnavailable):
            await self.board.answer(answer)

    def move(self, moving: int) -> int:
        """As many requests leave as arrive; returns how many waited before."""
        here = self.dispatcher.queue().ids()
        gone = self.chance.sample(here, min(moving, len(here)))
        moves = [ev.Cancelled(each) for each in gone]
        self.dispatcher.handle([*moves, *(next(self.coming) for _ in range(moving))], time.monotonic())
        return len(here)

    async def publish(self, queued: int) -> None:
        rates = {MODEL: MOVES / TICK_S}
        changes = self.feed.changes(rates)
        with suppress(LiveUnavailable):  # as a gateway does: a reader that missed something asks again
            if self.options.answer_after is not None:
                await self.board.publish_fleet(known_as(queued), ttl_s=FLEET_KEPT_S)
            asked = await self.board.queue_asked()
            if asked != self.answered:
                await self.board.publish_queue(self.feed.whole(rates, asked))
                self.answered = asked
            await self.board.send(LIVE_QUEUE, changes)


def known_as(queued: int) -> FleetMessage:
    """Who obeys commands is known as a gateway, one without engines."""
    return FleetMessage(
        gateway=NAME, at=time.time(), seq=0, period_s=1.0, instances=[], queued=queued, queued_tokens=0,
        in_flight=queued, arrival_rate=0.0, service_rate=0.0, wait_over_slo=0.0, models={}, classes=[], tenants={},
        policy="slackline",
    )  # fmt: skip


async def main(options: argparse.Namespace) -> None:
    crowd = Crowd(options)
    await crowd.start()
    print("crowded", flush=True)
    while True:
        await crowd.publish(crowd.move(0 if options.still else MOVES))
        await asyncio.sleep(TICK_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("rows", type=int)
    parser.add_argument("--answer-after", type=float)
    parser.add_argument("--still", action="store_true", help="nothing comes or goes by itself")
    parser.add_argument("--hang", type=int, default=0)
    parser.add_argument("--at", type=int, default=0)
    chosen = parser.parse_args()
    os.environ |= {"DJANGO_SETTINGS_MODULE": "console.settings", "SLACKLINE_ROLE": "manage", "REDIS_URL": chosen.url}
    os.environ.setdefault("DATABASE_URL", "postgres://nobody@127.0.0.1:1/none")  # named, never asked
    import django

    django.setup()
    asyncio.run(main(chosen))
