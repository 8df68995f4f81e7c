"""Puts the parts together and serves until a signal says stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator

import uvicorn

from workers.engine.config import ServerConfig
from workers.engine.emulated import EmulatedExecutor
from workers.engine.engine import Engine, LoopTimer
from workers.engine.generate import Generator
from workers.engine.http import App
from workers.engine.manage import Management

HARD_STOP_S = 2.0  # on top of the shutdown time-out, for clients that do not read their last bytes
BACKLOG = 4096
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they do not send into one that closes
logger = logging.getLogger("workers.engine")


class Server(uvicorn.Server):
    """Leaves signals to us, so that a stop asked for ends with exit status 0."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in self.servers[0].sockets if self.servers else ():
            logger.info("listening on http://%s:%d", *bound.getsockname()[:2])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def build(config: ServerConfig, loop: asyncio.AbstractEventLoop) -> tuple[App, Engine]:
    timer = LoopTimer(loop)
    engine = Engine(config.model, config.engine, config.batching, timer.now)
    engine.attach(EmulatedExecutor(config.profile, timer, engine.handle))
    generator = Generator(engine, config)
    routes = Management(engine, config, generator).routes()
    routes["/v1/completions"] = {"POST": generator.completions}
    routes["/v1/chat/completions"] = {"POST": generator.chat}
    return App(routes), engine


async def serve(config: ServerConfig) -> int:
    """The exit status: 0 after a stop that was asked for."""
    loop = asyncio.get_running_loop()
    app, engine = build(config, loop)
    server = Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http="httptools",
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(config.shutdown_timeout + HARD_STOP_S),
        )
    )
    stop = Stop(server, engine, config.shutdown_timeout)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.begin)
    gc.freeze()  # what is loaded now stays: collections need not look at it again
    engine.on_failure = stop.give_up
    await server.serve()
    engine.close()
    return int(engine.failed)


class Stop:
    """Running requests get `grace_s`; then they end with finish_reason abort. A second signal skips the wait."""

    def __init__(self, server: Server, engine: Engine, grace_s: float) -> None:
        self._server = server
        self._engine = engine
        self._grace_s = grace_s

    def begin(self) -> None:
        if self._engine.closing:
            self._engine.abort_all()
            return
        logger.info("stopping: %d requests have %.1f s to finish", self._engine.streams, self._grace_s)
        self._engine.closing = True
        if self._engine.scheduler.paused:
            self._engine.abort_all()
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._grace_s, self._engine.abort_all)

    def give_up(self) -> None:
        logger.error("the engine failed and ends")
        self._server.should_exit = True


def run(config: ServerConfig) -> None:
    import uvloop

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if config.startup_delay:
        logger.info("loading %s for %.1f s", config.model, config.startup_delay)
        time.sleep(config.startup_delay)  # the port stays closed meanwhile, as a loading vLLM's does
    logger.info(
        "%s, profile %s, %d KV blocks of %d tokens, %s batching",
        *(config.model, config.profile.id, config.engine.kv_blocks, config.engine.block_size, config.batching.name),
    )
    sys.exit(uvloop.run(serve(config)))
