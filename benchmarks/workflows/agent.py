"""A client with one deadline for all it asks, that can be killed at any moment and begun again: of the workflow story.

It plans, forks at the plan, explores the branches side by side, asks the same question in two of them, and writes the
end. Every request has a step key, so a second run of the same workflow gets what the first one has finished. It knows
nothing of what came before it: there is no file. Each event is one line of JSON on stdout.

    API_KEY=... python -m benchmarks.workflows.agent URL WORKFLOW --deadline SECONDS [--model NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import requests

STAGES = ({"name": "plan"}, {"name": "explore", "share": 3}, {"name": "check"}, {"name": "write", "share": 2})
REPORT = "The warehouse counted its stock again and found that half of the labels were wrong. " * 80
PLAN = "Name three causes that are worth a closer look, each in a sentence."
IDEAS = ("Look at the printers.", "Look at the suppliers.", "Look at the night shift.")
QUESTION = "How many labels does it say were wrong? Answer with the number alone."
END = "Write the summary for the managers."
# Output tokens: the first branch is done long before the others, so that a client can die between them.
PLAN_TOKENS, IDEA_TOKENS, CHECK_TOKENS, END_TOKENS = 60, (30, 140, 160), 30, 80
CHECKPOINT_S = 60
WAITING_S = 60  # for an engine: it rather waits than fails
ANSWER_S = 120.0

Messages = list[dict[str, str]]


class AgentStep(NamedTuple):
    """`fields`: of the body beside messages and metadata."""

    key: str
    stage: str
    parents: Sequence[str]
    messages: Messages
    tokens: int
    fields: Mapping[str, Any] = {}


class Agent:
    def __init__(self, url: str, api_key: str, model: str, workflow: str) -> None:
        self._url, self._model, self._workflow = url, model, workflow
        self._headers = {"authorization": f"Bearer {api_key}"}
        self._printing = threading.Lock()

    def tell(self, what: str, **more: Any) -> None:
        with self._printing:
            print(json.dumps({"what": what, "at": time.time(), **more}), flush=True)

    def call(self, method: str, path: str, **fields: Any) -> requests.Response:
        where = f"{self._url}/v1/workflows{path}"
        return requests.request(method, where, headers=self._headers, json=fields or None, timeout=ANSWER_S)

    def ask(self, step: AgentStep) -> str:
        """The text of a step's answer. Raises requests.RequestException, with what the gateway says."""
        told = {"workflow_id": self._workflow, "stage": step.stage, "step_key": step.key, "parents": [*step.parents]}
        body = {"model": self._model, "messages": step.messages, "max_tokens": step.tokens, "metadata": told}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"waiting_time": WAITING_S, **step.fields}
        where, text, began = f"{self._url}/v1/chat/completions", "", time.time()
        usage: dict[str, Any] = {}
        self.tell("asked", step=step.key)
        with requests.post(where, json=body, headers=self._headers, stream=True, timeout=ANSWER_S) as answer:
            checked(answer)
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise requests.RequestException(event["error"]["message"])
                usage = event.get("usage") or usage
                said = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                if said and not text:
                    self.tell("writing", step=step.key)
                text += said
            self.tell("answered", step=step.key, took_s=time.time() - began, **told_of(answer.headers, usage))
        return text

    def run(self, deadline_s: float) -> None:
        """Raises requests.RequestException."""
        begun = checked(self.call("POST", "", id=self._workflow, deadline=deadline_s, stages=STAGES))
        self.tell("begun", new=begun.status_code == 201, left_s=begun.json()["deadline_left"])
        asked: Messages = [{"role": "user", "content": f"{self._report()}\n{PLAN}"}]
        plan = self.ask(AgentStep("plan", "plan", (), asked, PLAN_TOKENS, {"checkpoint": CHECKPOINT_S}))
        known = [*asked, {"role": "assistant", "content": plan}]
        branches = self.forked()
        with ThreadPoolExecutor(len(IDEAS)) as pool:
            explored = [pool.submit(self.explore, number, known, branches[number]) for number in range(len(IDEAS))]
            found = [each.result() for each in explored]
            checks = [pool.submit(self.check, number) for number in range(2)]
            found += [each.result() for each in checks]
        written: Messages = [{"role": "user", "content": "\n".join([self._report(), plan, *found, END])}]
        parents = [*(f"explore-{number}" for number in range(len(IDEAS))), "check-0", "check-1"]
        self.ask(AgentStep("write", "write", parents, written, END_TOKENS))
        state = checked(self.call("GET", f"/{self._workflow}")).json()
        self.tell("done", left_s=state["deadline_left"], in_time=state["in_time"], requests=state["requests"])

    def _report(self) -> str:
        """Of this workflow alone: no engine has it in its prefix cache from another one."""
        return f"Report for {self._workflow}. {REPORT}"

    def forked(self) -> list[str]:
        """The names of the branches, the same ones after a crash; "" each, if the plan has no checkpoint any more:
        then they are computed whole."""
        answer = self.call("POST", f"/{self._workflow}/fork", step="plan", branches=len(IDEAS), fork_id="explore")
        if answer.status_code == 404:
            self.tell("forked", checkpoint="over")
            return [""] * len(IDEAS)
        fork = checked(answer).json()
        self.tell("forked", checkpoint=fork["checkpoint"], branches=len(fork["branches"]))
        return list(fork["branches"])

    def explore(self, number: int, known: Messages, branch: str) -> str:
        """One branch, which ends with its answer."""
        messages = [*known, {"role": "user", "content": IDEAS[number]}]
        fields = {"branch": branch} if branch else {}
        found = self.ask(AgentStep(f"explore-{number}", "explore", ("plan",), messages, IDEA_TOKENS[number], fields))
        if branch:
            self.call("DELETE", f"/{self._workflow}/branches/{branch}")
        return found

    def check(self, number: int) -> str:
        """The same question for each: whoever comes second gets the answer of the first one's call."""
        messages = [{"role": "user", "content": f"{self._report()}\n{QUESTION}"}]
        fields = {"share_call": True, "temperature": 0}
        return self.ask(AgentStep(f"check-{number}", "check", (f"explore-{number}",), messages, CHECK_TOKENS, fields))


def told_of(headers: Mapping[str, str], usage: Mapping[str, Any]) -> dict[str, Any]:
    """Of an answer. `stored`, `shared`: id of the request whose answer it is, "" if it is its own."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "request": headers.get("x-slackline-request-id", ""),
        "instance": headers.get("x-slackline-instance", ""),
        "stored": headers.get("x-slackline-stored", ""),
        "shared": headers.get("x-slackline-shared", ""),
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "cached_tokens": cached,
        "output_tokens": usage.get("completion_tokens", 0),
    }


def checked(answer: requests.Response) -> requests.Response:
    """Raises requests.HTTPError with the message of the gateway."""
    if not answer.ok:
        raise requests.HTTPError(f"{answer.url} answered {answer.status_code}: {answer.text[:500]}", response=answer)
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("workflow")
    parser.add_argument("--deadline", type=float, required=True, help="seconds")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    try:
        Agent(args.url, os.environ["API_KEY"], args.model, args.workflow).run(args.deadline)
    except requests.RequestException as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
