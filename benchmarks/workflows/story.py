"""`make workflow-story`: one workflow on a running `make up`, forked, killed, resumed and ended by its deadline.

A client (`benchmarks.workflows.agent`) begins a workflow with a deadline, plans, forks at the plan and explores three
branches. Once the first branch is answered and the others are being written, its process is killed (SIGKILL). A second
client runs the same program from its beginning: what the first one had finished is answered by step key. Two branches
then ask the same question and share one call, and a last request merges all of it.

Prints what happens as it happens, then one line of JSON:

- `resumed_tokens_new`: tokens that engines computed for the steps that the second client asked for again although the
  first had finished them, by the gateway's records. `resumed_steps`: how many those are.
- `prefill_tokens`: prompt tokens computed for each branch, and `prompt_tokens`, what its prompt has.
  `from_checkpoint`: branches that went on from the plan's KV, by the gateway's records.
- `engine_calls`: calls at engines of the two equal requests, by the gateway's records.
- `left_s`: seconds to the deadline at the end; `in_time`: whether the workflow counts as in time.
- `leaked_blocks`: KV blocks that checkpoints pin at the engines at the end, less those before; 0 if fewer.

It reads addresses, key and engines in DATA_DIR (default `.data`). The tenant needs a retention, as the demo's has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from benchmarks.servers.engines import ROOT
from benchmarks.workflows.agent import CHECKPOINT_S, IDEAS

DEADLINE_S = 60.0
PATIENCE_S = 15.0  # for records, which are stored within a second or two, and for the KV to be free
LOOK_S = 0.2
PINNED = "slackline_kv_checkpoint_blocks"
EXPLORED = [f"explore-{number}" for number in range(len(IDEAS))]
CHECKED = ["check-0", "check-1"]

Event = dict[str, Any]
Say = Callable[[str], None]


def being_written(steps: Sequence[str]) -> str:
    return f"{' and '.join(steps)} {'are' if len(steps) > 1 else 'is'} being written"


class StoryFailed(Exception):
    """What did not happen as it should have."""


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """Where the story takes place. `folder`: that of its data."""

    gateway: str
    console: str
    api_key: str
    model: str
    folder: Path

    def engines(self) -> list[str]:
        """URLs of those that are ready now: the scaler and operators start and stop engines while the story is told."""
        said = []
        for each in sorted((self.folder / "engines").glob("*.state.json")):
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                said.append(json.loads(each.read_text()))
        return [each["url"] for each in said if each.get("state") == "ready"]

    def record(self, request_id: str) -> dict[str, Any]:
        """What is stored of a request, which it is about a second after its end. Raises StoryFailed."""
        headers, end = {"authorization": f"Bearer {self.api_key}"}, time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            answer = requests.get(f"{self.console}/api/v1/requests/{request_id}", headers=headers, timeout=10)
            if answer.ok:
                return dict(answer.json())
            time.sleep(LOOK_S)
        raise StoryFailed(f"{request_id} is not on record after {PATIENCE_S:.0f} s")

    def pinned(self) -> int:
        """KV blocks that checkpoints hold at the engines. One that has ended holds none: it is asked until its state
        says so."""
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                return sum(pinned_at(url) for url in self.engines())
            except requests.ConnectionError:
                if time.monotonic() > end:
                    raise
            time.sleep(LOOK_S)


def pinned_at(engine: str) -> int:
    lines = requests.get(f"{engine}/metrics", timeout=5).text.splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith(f"{PINNED} ")))


def place_of(folder: Path) -> RunningSystem:
    """Of the `make up` that keeps its data in `folder`. Raises StoryFailed."""
    try:
        known = json.loads((folder / "credentials.json").read_text())
        ports = json.loads((folder / "ports.json").read_text())
    except OSError as error:
        raise StoryFailed(
            f"{error.filename} is missing: start `make up` first, or set DATA_DIR to its folder"
        ) from None
    gateway, console = (f"http://127.0.0.1:{ports[name]}" for name in ("gateway", "console"))
    return RunningSystem(gateway, console, known["api_key"], known["model"], folder)


class AgentProcess:
    """A process of the agent, and what it has told. `seen`: the events by what they tell of and their step."""

    def __init__(self, place: RunningSystem, workflow: str, deadline_s: float) -> None:
        command = [sys.executable, "-m", "benchmarks.workflows.agent", place.gateway, workflow]
        command += ["--deadline", str(deadline_s), "--model", place.model]
        env = {**os.environ, "API_KEY": place.api_key, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.seen: dict[tuple[str, str], Event] = {}

    def events(self) -> Generator[Event, None, None]:
        """Until it ends. Raises StoryFailed if it fails."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for line in self.process.stdout:
            event: Event = json.loads(line)
            self.seen[event["what"], event.get("step", "")] = event
            yield event
        if self.process.wait() > 0:
            raise StoryFailed(f"the client failed: {self.process.stderr.read().strip()}")

    def kill(self) -> None:
        """SIGKILL: it cannot say goodbye, and its connections are closed by the kernel."""
        self.process.kill()
        self.process.wait()

    def answers(self) -> dict[str, Event]:
        """By step."""
        return {step: event for (what, step), event in self.seen.items() if what == "answered"}


@dataclass(slots=True)
class Story:
    """One telling. `say` gets each line of it."""

    place: RunningSystem
    say: Say = print
    deadline_s: float = DEADLINE_S
    workflow: str = field(default_factory=lambda: f"story-{secrets.token_hex(4)}")
    began_at: float = 0.0  # epoch seconds

    def tell(self) -> dict[str, Any]:
        """The figures of the last line. Raises StoryFailed and requests.RequestException."""
        before, self.began_at = self.place.pinned(), time.time()
        first = self._until_killed()
        second = self._resumed(first)
        done = second.seen["done", ""]
        figures = self._figures(first, second) | {"left_s": round(done["left_s"], 3), "in_time": done["in_time"]}
        end = time.monotonic() + PATIENCE_S
        # Less than before if an engine that held KV of others ended meanwhile.
        while (leaked := max(0, self.place.pinned() - before)) and time.monotonic() < end:
            time.sleep(LOOK_S)
        told = f"{leaked} KV blocks more than before" if leaked else "no KV any more"
        self._line(time.time(), f"Checkpoints hold {told}.")
        return {"benchmark": "workflow-story", "workflow": self.workflow, **figures, "leaked_blocks": leaked}

    def _until_killed(self) -> AgentProcess:
        client = AgentProcess(self.place, self.workflow, self.deadline_s)
        wanted = {("answered", EXPLORED[0]), *(("writing", name) for name in EXPLORED[1:])}
        with contextlib.closing(client.events()) as events:
            for event in events:
                self._event(event)
                if wanted <= client.seen.keys():
                    break
        client.kill()
        running = [name for name in EXPLORED if name not in client.answers()]
        if not running:
            raise StoryFailed("the client had finished its branches before it could be killed")
        cut = being_written(running)
        self._line(time.time(), f"The client (process {client.process.pid}) is killed while {cut}.")
        return client

    def _resumed(self, first: AgentProcess) -> AgentProcess:
        client = AgentProcess(self.place, self.workflow, self.deadline_s)
        self._line(time.time(), f"Process {client.process.pid} runs the same program from its beginning.")
        for event in client.events():
            self._event(event)
        lost = [step for step in first.answers() if not client.answers()[step]["stored"]]
        if lost:
            raise StoryFailed(f"computed again although the first client had finished it: {', '.join(lost)}")
        return client

    def _figures(self, first: AgentProcess, second: AgentProcess) -> dict[str, Any]:
        again = [self.place.record(second.answers()[step]["request"]) for step in first.answers()]
        asked = [self.place.record(second.answers()[step]["request"]) for step in CHECKED]
        branches = {**second.answers(), **first.answers()}
        return {
            "resumed_steps": len(again),
            "resumed_tokens_new": sum(computed(row) for row in again),
            "prefill_tokens": [prefilled(branches[step]) for step in EXPLORED],
            "prompt_tokens": [branches[step]["prompt_tokens"] for step in EXPLORED],
            "from_checkpoint": sum(went_on(self.place.record(branches[step]["request"])) for step in EXPLORED),
            "engine_calls": sum(row["attempts"] for row in asked),
        }

    def _event(self, event: Event) -> None:
        if line := in_words(event, self.deadline_s):
            self._line(event["at"], line)

    def _line(self, at: float, text: str) -> None:
        self.say(f"{at - self.began_at:6.1f} s  {text}")


def computed(row: Mapping[str, Any]) -> int:
    """Tokens of prompt and answer that engines computed for a request, by its record."""
    return int(row["prompt_tokens"] + row["output_tokens"]) if row["attempts"] else 0


def went_on(row: Mapping[str, Any]) -> bool:
    """Whether a request went on from the KV of a checkpoint, by its record."""
    return any(step["reason"] == "from_checkpoint" for step in row["decisions"])


def prefilled(event: Event) -> int:
    """Prompt tokens that its engine computed."""
    return int(event["prompt_tokens"] - event["cached_tokens"])


def in_words(event: Event, deadline_s: float) -> str:
    """ "" for what is not told."""
    what = event["what"]
    if what == "begun":
        told = "begins" if event["new"] else "goes on"
        return f"The workflow {told}: {event['left_s']:.1f} of {deadline_s:.0f} s left."
    if what == "forked":
        if event["checkpoint"] == "over":
            return "The plan's checkpoint has ended, so branches compute their whole prompts."
        held = event["checkpoint"] == "held"
        kept = f"its engine holds the plan's KV for {CHECKPOINT_S} s" if held else "the plan's KV is lost"
        return f"Forked at the plan into {event['branches']} branches, {kept}."
    if what == "done":
        told = "in time" if event["in_time"] else "not in time"
        left_s = event["left_s"]
        return f"The workflow is done {abs(left_s):.1f} s {'after' if left_s < 0 else 'before'} its deadline, {told}."
    return answered_in_words(event) if what == "answered" else ""


def answered_in_words(event: Event) -> str:
    step, tokens = event["step"], event["output_tokens"]
    if event["stored"]:
        return f"{step}: the stored answer, {tokens} tokens, none of them new."
    if event["shared"]:
        return f"{step}: the answer of the equal request, {tokens} tokens, without a call of its own."
    written = f"{tokens} tokens written in {event['took_s']:.1f} s at {event['instance']}"
    return f"{step}: {written}, {prefilled(event):,} of {event['prompt_tokens']:,} prompt tokens computed."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds (default: %(default)s)")
    args = parser.parse_args()
    try:
        place = place_of(Path(os.environ.get("DATA_DIR") or ".data").expanduser())
        story = Story(place, deadline_s=args.deadline)
        print(f"{story.workflow}: {place.console}/workflows/one/?tenant=demo&workflow={story.workflow}")
        figures = story.tell()
    except (StoryFailed, requests.RequestException) as error:
        print(f"workflow-story: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures))
    return 0 if figures["in_time"] and not figures["leaked_blocks"] else 1


if __name__ == "__main__":
    sys.exit(main())
