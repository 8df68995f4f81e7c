"""How the tests of this folder wait for their cluster, without Ray: it must neither wait in vain nor miss a failure."""

from __future__ import annotations

import subprocess
import sys

import pytest
import requests

from tests.ray import cluster
from tests.ray.cluster import Cluster

NODE = "127.0.0.2"


class Told(Cluster):
    """A cluster that lists these nodes and these states of its first job, one after the other; the last one stays."""

    def __init__(self, nodes: list[list[str] | Exception], states: list[str] | None = None) -> None:
        super().__init__()
        self.lists, self.states = nodes, states or []
        self.looks = 0

    def alive(self) -> list[str]:
        self.looks += 1
        found = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        if isinstance(found, Exception):
            raise found
        return found

    def jobs(self) -> dict[str, str]:
        return {"first-of-all": self.states.pop(0) if len(self.states) > 1 else self.states[0]}

    def _ray(self, address: str, *options: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "START_S", 2.0)


def added(made: Told) -> None:
    try:
        made.add(NODE, 1)
    finally:
        made.nodes[NODE].kill()
        made.nodes[NODE].wait(10)
        made.folder.rmdir()


def test_a_node_that_has_joined_before_the_first_look_is_seen() -> None:
    made = Told([["10.0.0.1", NODE]])
    added(made)
    assert made.looks == 1, "it waits for nothing more"


def test_a_node_is_waited_for_while_others_are_alive_and_the_head_answers_late() -> None:
    made = Told([requests.ReadTimeout(), ["10.0.0.1"], ["10.0.0.1", "127.0.0.3"], ["10.0.0.1", NODE]])
    added(made)
    assert made.lists == [["10.0.0.1", NODE]], "not before it is listed"


def test_a_first_job_that_fails_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        status_code = 200

    monkeypatch.setattr(cluster, "START_S", 30.0)
    monkeypatch.setattr(requests, "post", lambda *_, **__: Answer())
    made = Told([[]], ["PENDING", "FAILED"])
    with pytest.raises(AssertionError, match="the first job failed"):
        made.runs_jobs()
    made.folder.rmdir()
