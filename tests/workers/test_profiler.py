"""The profiler finds the coefficients of an engine whose times are known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from controller.core.types import KEY_MADE, LatencyCoefficients
from controller.predict.latency import LatencyModel
from controller.predict.latency_fit import DecodeSample, PrefillSample
from workers.http import engine_keys
from workers.http.engine_keys import EngineKey
from workers.http.fleet_proof import made_key
from workers.profiler import (
    EngineProfiler,
    ProfileSamples,
    ProfilingFailed,
    ProfilingLimits,
    decode_sample,
    main,
    parser,
    profile_engines,
)

TRUE = LatencyCoefficients(0.01, 2e-5, 0.0, 0.004, 0.0, 1e-4)
EVENT = b'data: {"choices":[{"text":"x"}]}\n\n'
METRICS = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'


class Engine:
    """Continuous batching in a few lines: all waiting prompts are one prefill step, then all decode together."""

    def __init__(self) -> None:
        self.model = LatencyModel(TRUE)
        self.waiting: list[tuple[int, int, asyncio.Queue[bool]]] = []
        self.arrived = asyncio.Event()

    async def loop(self) -> None:
        running: list[list] = []
        while True:
            if not self.waiting and not running:
                self.arrived.clear()
                await self.arrived.wait()
            if self.waiting:
                batch, self.waiting = self.waiting, []
                await self._spend(self.model.prefill([length for length, _, _ in batch]))
                running += [[tokens, queue] for _, tokens, queue in batch]
            else:
                await self._spend(self.model.decode(len(running), 0))
            for item in running:
                item[0] -= 1
                item[1].put_nowait(item[0] > 0)
            running = [item for item in running if item[0] > 0]

    @staticmethod
    async def _spend(seconds: float) -> None:
        """Sleeping overshoots by up to a millisecond, so the last part is spent awake."""
        end = time.perf_counter() + seconds
        await asyncio.sleep(max(0.0, seconds - 0.002))
        while time.perf_counter() < end:
            await asyncio.sleep(0)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        queue: asyncio.Queue[bool] = asyncio.Queue()
        self.waiting.append((len(body["prompt"]), body["max_tokens"], queue))
        self.arrived.set()
        response = web.StreamResponse()
        await response.prepare(request)
        more = True
        while more:
            more = await queue.get()
            await response.write(EVENT)
        return response


async def metrics(request: web.Request) -> web.Response:
    return web.Response(text=METRICS)


async def full(request: web.Request) -> web.Response:
    return web.Response(status=503, text="full")


@pytest.fixture
async def server():
    engine = Engine()
    app = web.Application()
    app.router.add_post("/v1/completions", engine.completions)
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as started:
        task = asyncio.create_task(engine.loop())
        yield started
        task.cancel()


def base(server: TestServer) -> str:
    return str(server.make_url("")).rstrip("/")


async def test_measured_batches_match_the_engine(server):
    profile = ProfileSamples()
    async with ClientSession() as session:
        profiler = EngineProfiler(session, base(server), "mid", seed=1)
        await profiler.settle()
        for batch, length in ((1, 512), (2, 1024), (4, 512), (4, 1024)):
            await profiler.measure(batch, length, profile)
    model = LatencyModel(TRUE)
    assert profile.points == 4
    assert len(profile.prefill) + profile.discarded == 4
    # A busy machine only adds time; nothing may look faster than the engine is.
    for sample in profile.prefill:
        true_s = model.prefill_sums(sample.tokens, sample.squares)
        assert 0.8 * true_s < sample.seconds < 4 * true_s + 0.05
    assert len(profile.decode) == 4
    for step in profile.decode:
        assert 0.8 * model.decode(step.batch, 0) < step.seconds < 4 * model.decode(step.batch, 0) + 0.02


async def test_a_blocker_that_ended_before_its_batch_came_measures_nothing(server):
    """It takes this engine 41 ms: half a second later the batch finds it idle."""
    profile = ProfileSamples()
    async with ClientSession() as session:
        profiler = EngineProfiler(session, base(server), "mid", seed=1)
        profiler.lead_s = 0.5
        await profiler.measure(2, 1024, profile)
        assert (profile.prefill, profile.discarded, len(profile.decode)) == ([], 1, 1)
        await profiler.settle()
    assert 0.4 * 0.04 <= profiler.lead_s <= 0.06


async def test_a_profile_has_what_engines_and_instances_read(server):
    profile = await profile_engines([base(server)], "mid", ProfilingLimits(2, 600, budget_s=2.0))
    written = profile.as_json("mid", [base(server)])
    assert set(written["coefficients"]) == set(LatencyCoefficients._fields)
    assert written["prefill"]["b"] == written["coefficients"]["prefill_b"]
    assert written["kv_capacity_tokens"] == 16_000
    assert len(written["samples"]["prefill"]) + written["discarded"] == written["points"]


def test_the_grid_respects_all_bounds():
    points = ProfilingLimits(max_num_seqs=32, max_model_len=1100, batch_tokens=8192).points()
    assert max(batch for batch, _ in points) == 32
    assert max(length for _, length in points) == 1024
    assert all(batch == 1 or batch * length <= 8192 for batch, length in points)
    assert 384 in {length for _, length in points}  # App. A prints 284
    assert points == ProfilingLimits(max_num_seqs=32, max_model_len=1100, batch_tokens=8192).points()


def test_decode_counts_only_while_all_decode():
    early, late = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    sample = decode_sample([early, late], length=10)
    assert sample is None  # three common steps are too few
    sample = decode_sample([[*early, 0.6, 0.7], late], length=10)
    assert sample.batch == 2
    assert sample.seconds == pytest.approx(0.1)
    assert sample.context_sum == 2 * (10 + 2 + 2.5)  # 3 and 1 tokens before, 5 common steps


def test_outliers_are_fitted_away():
    model = LatencyModel(TRUE)
    prefill = [PrefillSample(n, n * n, model.prefill_sums(n, n * n)) for n in range(100, 3000, 100)]
    decode = [DecodeSample(b, 100 * b, model.decode(b, 0)) for b in range(1, 33)]
    disturbed = ProfileSamples([*prefill, PrefillSample(500, 250_000, 0.5)], [*decode, DecodeSample(4, 400, 0.2)])
    found = disturbed.fit().coefficients
    assert found.prefill_b == pytest.approx(TRUE.prefill_b, rel=0.02)
    assert found.decode_a == pytest.approx(TRUE.decode_a, rel=0.02)


async def test_a_refusing_engine_is_an_error():
    app = web.Application()
    app.router.add_post("/v1/completions", full)
    async with TestServer(app) as started:
        with pytest.raises(ProfilingFailed, match="503: full"):
            await profile_engines([base(started)], "mid", ProfilingLimits(budget_s=1.0))


KEY = "sk-of-this-engine"


def asks_for(key: str) -> Callable[..., Awaitable[web.StreamResponse]]:
    """An engine with `--api-key`: whoever does not send the key gets 401, at every path."""

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        return await handler(request)

    return guard


@asynccontextmanager
async def guarded(key: str) -> AsyncIterator[str]:
    engine = Engine()
    app = web.Application(middlewares=[asks_for(key)])
    app.router.add_post("/v1/completions", engine.completions)
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as started:
        task = asyncio.create_task(engine.loop())
        yield base(started)
        task.cancel()


async def profiled(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of the command."""
    monkeypatch.setattr(
        "sys.argv", ["profiler", "--model", "mid", "--budget", "0.2", "--max-num-seqs", "2", *arguments]
    )
    return await asyncio.to_thread(main)


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINE_KEYS_DIR", str(tmp_path))
    monkeypatch.setattr(engine_keys, "CHECKED_S", 0.0)
    return tmp_path


async def test_engines_with_keys_of_their_own_are_profiled(server, keys, monkeypatch):
    """One has a key in a file, one is started by Slackline, and one asks for none."""
    monkeypatch.setenv("FLEET_TOKEN", "a-token-of-the-fleet")
    async with guarded(KEY) as registered, guarded(made_key("a-token-of-the-fleet", "ref-1")) as started:
        (keys / "gpu-1").write_text(f"{registered} {KEY}\n")
        urls = ["--url", registered, "--key-name", "gpu-1", "--url", base(server), "--url", started]
        given = parser().parse_args([*urls, "--key-of", "ref-1", "--model", "mid", "--output", "profile.json"])
        limits = ProfilingLimits(2, 600, budget_s=0.5)
        profile = await profile_engines(given.url, given.model, limits, keys=given.keys)
    assert profile.kv_capacity_tokens == 16_000
    assert profile.points >= 3


async def test_without_its_key_an_engine_is_not_profiled(keys, monkeypatch, capsys, tmp_path):
    async with guarded(KEY) as registered:
        assert await profiled(monkeypatch, "--url", registered, "--output", str(tmp_path / "profile.json")) == 1
    assert "401" in capsys.readouterr().err


async def test_a_key_for_another_address_is_not_sent(keys, monkeypatch, capsys, tmp_path):
    (keys / "gpu-1").write_text(f"http://127.0.0.1:9 {KEY}\n")
    seen = []

    async def listen(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=500)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", listen)
    async with TestServer(app) as listener:
        given = ["--url", base(listener), "--key-name", "gpu-1", "--output", str(tmp_path / "profile.json")]
        assert await profiled(monkeypatch, *given) == 1
    assert seen == []
    told = capsys.readouterr().err
    assert "the key gpu-1 is for 127.0.0.1:9, not for" in told
    assert KEY not in told


async def test_a_key_does_not_follow_a_redirect(keys):
    """The key is for one address. An engine that answers with another address gets no second request from us."""
    seen = []

    async def listen(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(text="data: {}")

    away, app = web.Application(), web.Application()
    away.router.add_route("*", "/{path:.*}", listen)
    async with TestServer(away) as listener:

        async def redirect(request: web.Request) -> web.Response:
            raise web.HTTPTemporaryRedirect(base(listener) + request.path)

        app.router.add_route("*", "/{path:.*}", redirect)
        async with TestServer(app) as engine:
            (keys / "gpu-1").write_text(f"{base(engine)} {KEY}\n")
            key = EngineKey("gpu-1", url=base(engine))
            with pytest.raises(ProfilingFailed, match="307"):
                await profile_engines([base(engine)], "mid", ProfilingLimits(budget_s=0.2), keys=[key])
    assert seen == []


@pytest.mark.parametrize("given", [["--key-name", "gpu-1"], ["--key-of", "ref-1"]])
def test_a_key_needs_a_url_before_it(monkeypatch, capsys, tmp_path, given):
    arguments = [*given, "--url", "http://127.0.0.1:9", "--model", "mid", "--output", str(tmp_path / "p.json")]
    monkeypatch.setattr("sys.argv", ["profiler", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert f"{given[0]}: must follow the --url that it is for" in capsys.readouterr().err


def test_a_started_engine_has_no_key_without_the_fleets_token(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("FLEET_TOKEN", raising=False)
    monkeypatch.delenv("FLEET_TOKEN_FILE", raising=False)
    assert EngineKey(KEY_MADE, "ref-1", "http://127.0.0.1:9").headers() == {}
    arguments = ["--url", "http://127.0.0.1:9", "--key-of", "ref-1", "--model", "mid", "--output", str(tmp_path / "p")]
    monkeypatch.setattr("sys.argv", ["profiler", *arguments])
    assert main() == 1
    assert "FLEET_TOKEN" in capsys.readouterr().err
