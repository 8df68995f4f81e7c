"""A gateway whose queue is long and never still, for the Queue page: `python -m tests.browser.crowd REDIS_URL ROWS`.

It is the real dispatcher, feed and board without a data path: requests arrive and are given up, none is ever sent.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator
from itertools import count

NAME = "gateway-crowd"
MODEL = "crowd"
CLASSES = ("interactive", "analytics", "summaries")
TICK_S = 0.25
MOVES = 25  # of each kind in a tick: a hundred a second come, a hundred go
MINUTE_S = 60.0


async def main(url: str, rows: int) -> None:
    import redis

    from api.openai.queue_feed import QueueFeed
    from controller.core import events as ev
    from controller.core.messages import GATEWAYS_KEY, LIVE_QUEUE
    from controller.core.types import InstanceSpec, Request, Targets
    from controller.dispatch import build_dispatcher
    from workers.live import LiveState

    dispatcher, chance = build_dispatcher("slackline"), random.Random(7)
    board = LiveState(url, NAME)

    def arrivals() -> Iterator[ev.Arrived]:
        for number in count():
            targets = Targets(chance.choice([20.0, 40.0, 90.0]), 0.1, None, 60 * MINUTE_S)
            yield ev.Arrived(
                Request(
                    f"crowd-{number:06}", time.monotonic(), targets, chance.randint(10, 900), 100, MODEL,
                    tenant="crowd", slo_class=chance.choice(CLASSES),
                )
            )  # fmt: skip

    coming = arrivals()
    dispatcher.handle([ev.InstanceUp(InstanceSpec("busy-for-ever", MODEL, max_num_seqs=1))], time.monotonic())
    dispatcher.handle([next(coming) for _ in range(rows)], time.monotonic())
    feed = QueueFeed(NAME, dispatcher, time.time() - time.monotonic())
    await feed.start()
    redis.Redis.from_url(url).sadd(GATEWAYS_KEY, NAME)
    answered = 0
    print("crowded", flush=True)
    while True:
        gone = chance.sample(dispatcher.queue().ids(), MOVES)
        moves = [ev.Cancelled(each) for each in gone]
        dispatcher.handle([*moves, *(next(coming) for _ in range(MOVES))], time.monotonic())
        rates = {MODEL: MOVES / TICK_S}
        changes, asked = feed.changes(rates), await board.queue_asked()
        if asked != answered:
            await board.publish_queue(feed.whole(rates, asked))
            answered = asked
        await board.send(LIVE_QUEUE, changes)
        await asyncio.sleep(TICK_S)


if __name__ == "__main__":
    os.environ |= {"DJANGO_SETTINGS_MODULE": "console.settings", "SLACKLINE_ROLE": "manage", "REDIS_URL": sys.argv[1]}
    os.environ.setdefault("DATABASE_URL", "postgres://nobody@127.0.0.1:1/none")  # named, never asked
    import django

    django.setup()
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
