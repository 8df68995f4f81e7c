"""Time to first token of a prompt whose prefix another engine has cached, by what the engine does with it.

    python -m benchmarks.torch.borrow --gbit 0.05 --prefix 1024 --rest 1024

Two reference engines with a real model (PyTorch, random weights) on two hosts: a network namespace behind a veth pair
with HTB. The lender has computed the prefix. `computed`: the other engine computes all of the prompt; `after`: it
copies the prefix, then computes the rest (continuous batching); `during`: it computes the rest while the prefix is
copied (preemptive scheduler). In each round every way gets a new prefix of its own. The requests are sent one at a
time, and the first token is the only one. Steps are whole prompts everywhere.

Prints a table, then one line of JSON: `ttft_s` (median by way), `saved_pct` of `during` against `after`, `borrowed`
(share of the prefix's tokens that came from the lender, by way), and whether all ways gave the same token
(`tokens_equal`, from prompts that all three got). Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from benchmarks.load.trials import note
from benchmarks.machine.network import NETWORK, SecondHost, network_missing, second_host
from benchmarks.servers.engines import reference_engines
from benchmarks.servers.shapes import SHAPES, add_shape_options, checked, random_model
from workers.actions.fleet_calls import call_fleet

WAYS = {
    "computed": ("--scheduler", "continuous"),
    "after": ("--scheduler", "continuous", "--borrow-tokens", "64"),
    "during": ("--scheduler", "preemptive", "--borrow-tokens", "64"),
}
UP_S, ANSWER_S = 60.0, 300.0
SPARE_TOKENS = 64  # of the context, beyond prompt and answer


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """`cached`: tokens of the prompt that were not computed here."""

    seconds: float
    cached: int
    text: str


def ask(url: str, prompt: Sequence[int]) -> TimedAnswer:
    """Raises requests.RequestException."""
    body = {"prompt": list(prompt), "max_tokens": 1, "ignore_eos": True, "temperature": 0}
    began = time.monotonic()
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=ANSWER_S)
    seconds = time.monotonic() - began
    answer.raise_for_status()
    said = answer.json()
    details = said["usage"].get("prompt_tokens_details") or {}
    return TimedAnswer(seconds, details.get("cached_tokens", 0), said["choices"][0]["text"])


def link(url: str, lender_url: str, token: str) -> None:
    """Have the engine keep a link to the lender, and wait until it is up. Raises RuntimeError."""
    at = requests.get(f"{lender_url}/links", timeout=10.0).json()["at"]
    body = {"id": "borrower", "peers": [{"id": "lender", **at}], "wait_s": 5.0}
    call_fleet("POST", url, "/links", token, body=body, timeout=15.0).raise_for_status()
    give_up_at = time.monotonic() + UP_S
    while (state := requests.get(f"{url}/links", timeout=10.0).json()["peers"][0]["state"]) != "up":
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"the link is {state}")
        time.sleep(0.1)


class ThreeWays:
    """`urls`: of the engine of each way."""

    def __init__(self, lender: str, urls: dict[str, str], vocabulary: int, seed: int) -> None:
        self.lender, self.urls = lender, urls
        self._vocabulary, self._rng = vocabulary, random.Random(seed)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(count)]

    def round(self, prefix: int, rest: int) -> dict[str, TimedAnswer]:
        found = {}
        for way, url in self.urls.items():
            common = self._tokens(prefix)
            ask(self.lender, [*common, 0])
            found[way] = ask(url, [*common, *self._tokens(rest)])
        return found

    def equal(self, prefix: int, rest: int) -> bool:
        """Whether one prompt gets the same token everywhere."""
        common, own = self._tokens(prefix), self._tokens(rest)
        ask(self.lender, [*common, 0])
        return len({ask(url, [*common, *own]).text for url in self.urls.values()}) == 1


def result(rounds: Sequence[dict[str, TimedAnswer]], prefix: int, equal: bool) -> dict[str, Any]:
    ttft_s = {way: round(statistics.median(each[way].seconds for each in rounds), 4) for way in WAYS}
    borrowed = {way: round(statistics.mean(each[way].cached for each in rounds) / prefix, 3) for way in WAYS}
    saved_pct = round(100 * (1 - ttft_s["during"] / ttft_s["after"]), 1)
    return {"ttft_s": ttft_s, "saved_pct": saved_pct, "borrowed": borrowed, "tokens_equal": equal}


def measure(args: argparse.Namespace, host: SecondHost, logs: Path, token: str) -> dict[str, Any]:
    context = args.prefix + args.rest + SPARE_TOKENS
    model, _ = random_model(args, logs / "model", context)
    options: tuple[str, ...] = ("--executor", "torch", "--model", str(model), "--device", args.device)
    options = (*options, "--threads", str(args.threads))
    options = (*options, "--max-model-len", str(context), "--max-num-batched-tokens", str(context))
    options = (*options, "--kv-cache-gib", str(args.kv_gib), "--profile", "constant:5ms")
    with ExitStack() as stack:
        (lender,) = stack.enter_context(reference_engines(1, logs, *options, host=host.here))
        there = reference_engines(3, logs, *options, host=host.there, before=host.command, each=list(WAYS.values()))
        urls = dict(zip(WAYS, (engine.url for engine in stack.enter_context(there)), strict=True))
        for way in ("after", "during"):
            link(urls[way], lender.url, token)
        bed = ThreeWays(lender.url, urls, SHAPES[args.shape].vocabulary, args.seed)
        bed.round(args.prefix, args.rest)  # warm-up
        rounds = []
        for number in range(args.rounds):
            rounds.append(bed.round(args.prefix, args.rest))
            note(f"{number + 1}: { ({way: round(each.seconds, 3) for way, each in rounds[-1].items()}) }")
        return result(rounds, args.prefix, bed.equal(args.prefix, args.rest))


def table(found: dict[str, Any]) -> str:
    rows = [f"{'':10}{'first token':>12}{'borrowed':>10}"]
    rows += [f"{way:10}{found['ttft_s'][way]:>10.3f} s{100 * found['borrowed'][way]:>9.0f}%" for way in WAYS]
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add_shape_options(parser, "thin")
    parser.add_argument("--gbit", type=float, default=0.05, help="of the link between the hosts (%(default)s)")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that the lender has (%(default)s)")
    parser.add_argument("--rest", type=int, default=1024, help="further tokens of the prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each engine (%(default)s)")
    parser.add_argument("--kv-gib", type=float, default=0.5, help="KV cache of each engine (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = checked(parser, parser.parse_args(argv))
    if (missing := network_missing()) is not None:
        parser.exit(1, f"{missing}\n")
    token = os.environ["FLEET_TOKEN"] = secrets.token_urlsafe(16)
    os.environ["ENGINE_NETWORKS"] = f"{NETWORK}.0.0/15"
    with tempfile.TemporaryDirectory(prefix="slackline-borrow-") as folder, second_host(args.gbit) as host:
        found = measure(args, host, Path(folder), token)
    kept = ("shape", "dtype", "device", "gbit", "prefix", "rest", "rounds", "threads", "seed")
    print(table(found))
    print(json.dumps({**found, **{name: getattr(args, name) for name in kept}}))


if __name__ == "__main__":
    main()
