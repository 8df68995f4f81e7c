"""A recorded scale-out of real weights, to look at: `make screenshots PAGES=scale-out` (the target installs PyTorch).

A small random model on the PyTorch executor with one warm engine beside it; more requests than one engine takes, until
the scaler has weights moved from the first engine's memory to the warm one and that has served.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.browser.running.caller import Caller, within
from tests.browser.running.stack import Stack, running

MODEL = "real-weights"
SIZES = ("--layers", "8", "--hidden", "1024", "--heads", "16", "--kv-heads", "4", "--vocabulary", "4096")
POLICY = {"min_instances": 1, "max_instances": 2, "upper": 0.6, "lower": 0.05, "sustain_s": 600.0, "cooldown_s": 2.0}
READY_S, SERVED_S = 180.0, 180.0
REQUESTS = 40


@contextmanager
def scaled_out() -> Iterator[tuple[Stack, list[str]]]:
    """A stack whose scaler has done it, and the paths that show it."""
    from workers.engine.torch.model.random import main as make_model

    folder = Path(tempfile.mkdtemp(prefix="slackline-model-"))
    try:
        make_model([str(folder), *SIZES, "--context", "2048"])
        with running() as stack:
            caller = Caller(stack, "admin")
            (out, served) = happened(stack, caller, folder)
            yield stack, ["/scaling/", f"/audit/{out['id']}/", f"/audit/{served['id']}/"]
    finally:
        shutil.rmtree(folder)


def happened(stack: Stack, caller: Caller, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The decisions to scale out, and that it served."""
    spec = {"executor": "torch", "folder": str(folder), "threads": 1, "kv_cache_gib": 0.05, "max_model_len": 2048}
    caller.post("models", {"name": MODEL, "context_tokens": 2048})
    first = {"id": f"{MODEL}-1", "model": MODEL, "backend": "reference", "provisioner": "process", "max_num_seqs": 2}
    caller.post("instances", {**first, "spec": spec})
    within(READY_S, lambda: caller.get(f"instances/{MODEL}-1")["observed_state"] == "ready")
    caller.post("scaling-policies", {"model": MODEL, "warm": 1, **POLICY})
    within(READY_S, lambda: warm(caller))
    sent: list[Future[int]] = []

    def served() -> list[dict[str, Any]]:
        if sum(not each.done() for each in sent) < REQUESTS:
            body = {"prompt": "Tell me about queues.", "max_tokens": 200, "ignore_eos": True, "stream": True}
            sent.extend(stack.send(REQUESTS, model=MODEL, slo_class="batch", waiting_time=60, **body))
        return of_model(caller, "scale_out_served")

    within(SERVED_S, served)
    statuses = {each.result() for each in sent}
    assert 200 in statuses, statuses
    return of_model(caller, "scale_out")[-1], of_model(caller, "scale_out_served")[-1]


def warm(caller: Caller, model: str = MODEL) -> bool:
    """One of its engines is ready and has no weights."""
    rows = caller.get("instances", model=model, observed_state="ready")["items"]
    return any(each["weights"] == "absent" for each in rows)


def of_model(caller: Caller, kind: str) -> list[dict[str, Any]]:
    return [each for each in caller.recorded(kind) if str(each["subject"]).startswith(f"{MODEL}/")]
