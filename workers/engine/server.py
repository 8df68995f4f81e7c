"""Assembles the engine and serves until a signal stops it."""

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
from dataclasses import replace
from typing import Any, Literal

import uvicorn

from controller.core.errors import ConfigError, SlacklineError
from controller.engine import EngineConfig
from controller.engine.kv_costs import KvCosts, MeasuredCosts
from controller.predict.boundaries import ComposedBoundaries, shape
from workers.engine import swap_metrics
from workers.engine.checkpoints import CheckpointLeases
from workers.engine.config import ServerConfig
from workers.engine.emulated import EmulatedExecutor
from workers.engine.emulated_swap import emulated_costs
from workers.engine.engine import Engine, LoopTimer
from workers.engine.http.asgi import App
from workers.engine.http.bounds import BoundEndpoints
from workers.engine.http.generate import Generator
from workers.engine.http.guard import FleetGuard
from workers.engine.http.kv import KvEndpoints
from workers.engine.http.management import Management
from workers.engine.http.requests import RequestRules
from workers.engine.http.weights import WeightEndpoints
from workers.engine.kv.disaggregation import Disaggregation
from workers.engine.kv.store import EmulatedKv, KvStore
from workers.engine.scheduler_choice import build_scheduler, deadlines_unused
from workers.engine.text.model_tokenizer import model_tokenizer
from workers.engine.weights.host_copy import HostCopy
from workers.engine.weights.manager import EmulatedWeights, WeightManager, WeightStore
from workers.flowd.client import FlowClient
from workers.http.limits import raise_file_limit, read_limits
from workers.http.protocol import bounded
from workers.log_lines import log_to_stderr

HARD_STOP_S = 2.0  # after the shutdown timeout, for clients that do not read their last bytes
BACKLOG = 4096
EMULATED_SHAPE = "llama3-8b"  # the model whose operators the emulated device runs
logger = logging.getLogger("workers.engine")


class EngineServer(uvicorn.Server):
    """A server that does not handle signals, so that a requested stop ends with exit status 0."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in self.servers[0].sockets if self.servers else ():
            logger.info("listening on http://%s:%d", *bound.getsockname()[:2])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def build(config: ServerConfig, loop: asyncio.AbstractEventLoop) -> tuple[App, Engine, Disaggregation | None]:
    timer = LoopTimer(loop)
    latency = config.profile.coefficients if config.profile else None
    scheduler = build_scheduler(config.engine, config.batching, config.preemption, latency, config.batching_options)
    scheduler.measure(KvCosts(config.engine.block_size, config.costs, swaps=config.engine.swap_blocks > 0))
    engine = Engine(config.model, scheduler, timer.now)
    engine.call_at = timer.call_at
    _attach_executor(engine, config, timer, loop)
    served = RequestRules(config.model, config.engine.max_model_len, config.tokenizer, samples=config.torch is not None)
    kv, store, disaggregation, flows = config.kv, None, None, None
    if kv.token and config.group is None:  # each of several ranks has only the KV of its own heads
        store = _kv_store(config)
        times = {"lease_s": kv.lease_s, "timeout_s": kv.timeout_s}
        flows = FlowClient(kv.flow_socket) if kv.flow_socket else None
        disaggregation = Disaggregation(
            engine,
            store,
            kv.token,
            config.host,
            reached_at=kv.reached_at,
            flows=flows,
            borrow_tokens=kv.borrow_tokens,
            **times,
        )
        disaggregation.expose(engine.metrics.registry)
    swap_metrics.expose(engine, engine.metrics.registry)
    checkpoints = CheckpointLeases(engine)
    checkpoints.expose(engine.metrics.registry)
    generator = Generator(engine, config, served, disaggregation, checkpoints)
    weights = WeightManager(_weight_store(config, engine, store, flows))
    guard = FleetGuard(kv.token, (kv.reached_at, config.host), config.urls, config.api_key)
    management = Management(engine, config, served, generator, weights, guard)
    routes = {**guard.routes(), **management.routes()}
    routes.update(KvEndpoints(disaggregation, guard, checkpoints).routes())
    routes.update(BoundEndpoints(engine, guard, engine.metrics.registry).routes())
    routes.update(WeightEndpoints(weights, guard, management.weights_came).routes())
    if not weights.store.present:
        management.begin_warm()
    routes["/v1/completions"] = {"POST": generator.completions}
    routes["/v1/chat/completions"] = {"POST": generator.chat}
    return App(routes, read_limits("engine").body_bytes, guard.admit), engine, disaggregation


def _weight_store(
    config: ServerConfig, engine: Engine, kv: KvStore | None, flows: FlowClient | None = None
) -> WeightStore:
    given = config.weights
    if config.torch is None:
        return EmulatedWeights(
            given.load_s, given.nbytes, present=given.present, model=config.model, token=config.kv.token
        )
    from workers.engine.torch.weights.store import TorchWeights
    from workers.engine.torch.weights.transfer import WeightMemory

    how = {"present": given.present, "keep_room": given.keep_room, "ranked": config.group is not None}
    memory = WeightMemory(config.program.model.slots(), **how)
    if not given.present:
        memory.release()
    own = TorchWeights(
        *(memory, config.torch.folder, config.kv.reached_at, config.kv.token, given.timeout_s, config.host_copy),
        model=config.model,
        marks=config.torch.marks,
        flows=flows,
    )
    if given.keep_room:
        return own
    whole: WeightStore = own
    if config.group is not None:
        if not given.present:
            config.group.ask("release", False)
        from workers.engine.torch.rank_weights import RankWeights

        whole = RankWeights(own, config.group)
    from workers.engine.torch.kv.layout import TorchKv
    from workers.engine.torch.kv.room import WithKv

    blocks, identity = engine.scheduler.blocks, kv.identity if isinstance(kv, TorchKv) else None
    return WithKv(whole, config.program.cache, lambda: blocks.free < blocks.total, identity)


def _kv_store(config: ServerConfig) -> KvStore:
    """Access to the executor's KV."""
    if config.torch is None:
        return EmulatedKv(config.kv.layers, config.kv.token_bytes, config.model)
    from workers.engine.torch.kv.layout import TorchKv

    return TorchKv(config.program.cache, config.program.model)


def _attach_executor(engine: Engine, config: ServerConfig, timer: LoopTimer, loop: asyncio.AbstractEventLoop) -> None:
    stops = _stops(config)
    if config.torch is not None:
        from workers.engine.torch.serving import attach_torch

        attach_torch(engine, config.program, loop, stops, config.group)
        return
    assert config.profile is not None
    boundaries = ComposedBoundaries(stops, shape(EMULATED_SHAPE), config.profile.coefficients) if stops else None
    engine.attach(EmulatedExecutor(config.profile, timer, engine.handle, boundaries, config.kv.layers, config.swap))


def _stops(config: ServerConfig) -> Literal["operator", "layer"] | None:
    """Where a running step may be suspended; None: nowhere. An emulated engine whose role chose its scheduler may later
    get one that suspends steps."""
    if config.by_stage and config.torch is None:
        return "operator"
    boundary = config.preemption.boundary if config.preemption else "none"
    return "operator" if boundary == "operator" else "layer" if boundary == "layer" else None


async def serve(config: ServerConfig) -> int:
    """Serve until stopped. Returns the exit status: 0 after a requested stop."""
    loop = asyncio.get_running_loop()
    app, engine, disaggregation = build(config, loop)
    if disaggregation is not None:
        await disaggregation.start(config.kv.port)
    server = EngineServer(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=bounded(raise_file_limit(read_limits("engine"))),
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            backlog=BACKLOG,
            timeout_graceful_shutdown=round(config.shutdown_timeout + HARD_STOP_S),
        )
    )
    stop = Stop(server, engine, config.shutdown_timeout)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.begin)
    gc.freeze()  # objects loaded until now stay, so garbage collections need not visit them
    engine.on_failure = stop.give_up
    await server.serve()
    if disaggregation is not None:
        disaggregation.close()
    engine.close()
    return int(engine.failed)


class Stop:
    """Stops the engine: running requests get `grace_s` seconds, then end with finish_reason abort. A second signal
    skips the wait."""

    def __init__(self, server: EngineServer, engine: Engine, grace_s: float) -> None:
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
        logger.error("the engine failed and stops: %s", self._engine.failure)
        self._server.should_exit = True


def run(config: ServerConfig) -> None:
    import uvloop

    log_to_stderr()
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if config.startup_delay:
        logger.info("loading %s for %.1f s", config.model, config.startup_delay)
        time.sleep(config.startup_delay)  # the port stays closed meanwhile, like that of vLLM while it loads
    try:
        config = with_model(config)
    except SlacklineError as error:
        logger.error("%s", error)
        sys.exit(1)
    logger.info(
        "%s, profile %s, %d KV blocks of %d tokens, %s batching",
        *(config.model, config.profile.id if config.profile else "none"),
        *(config.engine.kv_blocks, config.engine.block_size, config.batching.name),
    )
    if problem := deadlines_unused(config.batching.name, config.deadlines):
        logger.warning("%s", problem)
    sys.exit(uvloop.run(serve(config)))


def with_model(config: ServerConfig) -> ServerConfig:
    """The configuration with its model loaded, and measured if the scheduler must predict its steps.

    Raises SlacklineError; then no port was opened.
    """
    if config.torch is None:
        assert config.profile is not None
        return replace(config, costs=emulated_costs(config.profile, config.swap))
    try:
        from workers.engine.torch.serving import load_program, load_ranks, measure
    except ImportError as error:
        raise ConfigError(f"--executor torch requires `make torch` ({error})", "executor") from error
    options, engine = config.torch, config.engine
    shared, copies = None, config.weights.host_copy
    if copies is not None:
        shared = HostCopy(copies, options.folder, options.dtype)
    tokenizer = model_tokenizer(options.folder, options.config.vocab_size)
    group: Any = None
    load, measures = config.weights.present, config.profile is None and config.preemption is not None
    same: dict[str, Any] = {"blocks": engine.kv_blocks, "block_size": engine.block_size, "load": load}
    swaps = engine.swap_blocks > 0
    # A warm spare releases it after its measurement
    same["room"] = load or measures or swaps or config.weights.keep_room
    if options.ranks > 1:
        program, group = load_ranks(options, **same, boundary=_stops(config))
        config = replace(config, engine=replace(engine, copies_blocks=False))  # ranks are told of tokens alone
    else:
        place: dict[str, Any] = {"device": options.device, "dtype": options.dtype, "threads": options.threads}
        program = load_program(options.folder, options.config, **place, **same)
        if config.weights.keep_room and not config.weights.present:
            _reserve(program)
    profile, costs = config.profile, None
    if measures:
        profile = measure(program, config.model, engine.max_model_len, group)
    if swaps:
        costs = _costs_with_host(program, engine)
    return replace(
        config, tokenizer=tokenizer, program=program, profile=profile, costs=costs, group=group, host_copy=shared
    )


def _costs_with_host(program: Any, engine: EngineConfig) -> MeasuredCosts:
    """Allocate the host memory for evicted sequences and measure what it costs to use it. Raises ConfigError."""
    from workers.engine.torch.kv.host import HostBlocks, measure_costs

    program.host = HostBlocks(program.cache, engine.swap_blocks)
    costs = measure_costs(program, min(engine.max_model_len, engine.max_num_batched_tokens))
    logger.info(
        "%d KV blocks of host memory (%.1f MB): %.2e s out, %.2e s back; prompts %s s a token",
        *(engine.swap_blocks, program.host.nbytes / 1e6, costs.out_s, costs.back_s, dict(costs.prefill_s)),
    )
    return costs


def _reserve(program: Any) -> None:
    """Allocate and touch the memory of weights that come later. Raises ConfigError."""
    from workers.engine.torch.weights.transfer import reserve

    try:
        reserve(program.model.slots())
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(f"not enough memory for the weights: {str(error)[:200]}", "keep_room") from error
