"""A gateway whose queue is long and never still, for the Queue page: `python -m tests.browser.crowd REDIS_URL ROWS`.

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

NAME = "gateway-crowd"
MODEL = "crowd"
CLASSES = ("interactive", "analytics", "summaries")
TICK_S = 0.25
MOVES = 25  # of each kind in a tick: a hundred a second come, a hundred go
MINUTE_S = 60.0
FLEET_KEPT_S = 3.0


async def main(options: argparse.Namespace) -> None:
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

    dispatcher, chance = build_dispatcher("slackline"), random.Random(7)
    board = LiveState(options.url, NAME)

    def arrivals() -> Iterator[ev.Arrived]:
        for number in count():
            targets = Targets(chance.choice([20.0, 40.0, 90.0]), 0.1, None, 60 * MINUTE_S)
            yield ev.Arrived(
                Request(
                    f"crowd-{number:06}", time.monotonic(), targets, chance.randint(10, 900), 100, MODEL,
                    tenant="crowd", slo_class=chance.choice(CLASSES),
                )
            )  # fmt: skip

    heard, tasks = count(1), set()

    def obey(message: CommandMessage) -> None:
        queue, asked = dispatcher.queue(), message["request_ids"]
        here = [each for each in asked if queue.row(each, 0.0) is not None]
        kind, priority = message["kind"], message["priority"]
        told = ev.Command(message["id"], message["actor"], kind, tuple(here), priority)  # type: ignore[arg-type]
        dispatcher.handle([told], time.monotonic())
        gone = [each for each in asked if each not in set(here)]
        print(len(here), flush=True)
        if next(heard) == options.at:
            os.kill(options.hang, signal.SIGSTOP)
        answer = CommandAnswer(command=message["id"], gateway=NAME, applied=here, gone=gone, too_late=[])
        tasks.add(asyncio.get_running_loop().create_task(say(answer)))

    async def say(answer: CommandAnswer) -> None:
        await asyncio.sleep(options.answer_after)
        with suppress(LiveUnavailable):
            await board.answer(answer)

    def known_as(queued: int) -> FleetMessage:
        """Who obeys commands is known as a gateway, one without engines."""
        return FleetMessage(
            gateway=NAME, at=time.time(), seq=0, period_s=1.0, instances=[], queued=queued, queued_tokens=0,
            in_flight=queued, arrival_rate=0.0, service_rate=0.0, wait_over_slo=0.0, models={}, classes=[], tenants={},
            policy="slackline",
        )  # fmt: skip

    coming = arrivals()
    dispatcher.handle([ev.InstanceUp(InstanceSpec("busy-for-ever", MODEL, max_num_seqs=1))], time.monotonic())
    dispatcher.handle([next(coming) for _ in range(options.rows)], time.monotonic())
    feed = QueueFeed(NAME, dispatcher, time.time() - time.monotonic())
    await feed.start()
    redis.Redis.from_url(options.url).sadd(GATEWAYS_KEY, NAME)
    answered, moving = 0, 0 if options.still else MOVES
    if options.answer_after is not None:
        tasks.add(asyncio.create_task(follow(board, obey, lambda version: None)))
        mine = COMMAND_CHANNEL.format(gateway=NAME)
        while not dict(redis.Redis.from_url(options.url).pubsub_numsub(mine))[mine.encode()]:
            await asyncio.sleep(0.01)
    print("crowded", flush=True)
    while True:
        here = dispatcher.queue().ids()
        gone = chance.sample(here, min(moving, len(here)))
        moves = [ev.Cancelled(each) for each in gone]
        dispatcher.handle([*moves, *(next(coming) for _ in range(moving))], time.monotonic())
        rates = {MODEL: MOVES / TICK_S}
        changes = feed.changes(rates)
        with suppress(LiveUnavailable):  # as a gateway does: what was not told is asked for again
            if options.answer_after is not None:
                await board.publish_fleet(known_as(len(here)), ttl_s=FLEET_KEPT_S)
            asked = await board.queue_asked()
            if asked != answered:
                await board.publish_queue(feed.whole(rates, asked))
                answered = asked
            await board.send(LIVE_QUEUE, changes)
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
