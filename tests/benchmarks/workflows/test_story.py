"""The words and the figures of the workflow story; the story itself is told in tests/browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from benchmarks.workflows import story
from benchmarks.workflows.story import StoryFailed, being_written, computed, in_words, place_of, prefilled, went_on
from workers.supervisor.ports import free_port

ANSWERED = {
    "what": "answered", "step": "explore-0", "took_s": 0.52, "instance": "engine-1", "stored": "", "shared": "",
    "prompt_tokens": 1800, "cached_tokens": 1790, "output_tokens": 30,
}  # fmt: skip


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"what": "begun", "new": True, "left_s": 60.0}, "The workflow begins: 60.0 of 60 s left."),
        ({"what": "begun", "new": False, "left_s": 51.04}, "The workflow goes on: 51.0 of 60 s left."),
        (
            {"what": "forked", "checkpoint": "held", "branches": 3},
            "Forked at the plan into 3 branches, its engine holds the plan's KV for 60 s.",
        ),
        (
            {"what": "forked", "checkpoint": "lost", "branches": 3},
            "Forked at the plan into 3 branches, the plan's KV is lost.",
        ),
        (
            {"what": "forked", "checkpoint": "over"},
            "The plan's checkpoint has ended, so branches compute their whole prompts.",
        ),
        (ANSWERED, "explore-0: 30 tokens written in 0.5 s at engine-1, 10 of 1,800 prompt tokens computed."),
        (ANSWERED | {"stored": "req-1"}, "explore-0: the stored answer, 30 tokens, none of them new."),
        (
            ANSWERED | {"shared": "req-1"},
            "explore-0: the answer of the equal request, 30 tokens, without a call of its own.",
        ),
        (
            {"what": "done", "left_s": 4.25, "in_time": True},
            "The workflow is done 4.2 s before its deadline, in time.",
        ),
        (
            {"what": "done", "left_s": -0.1, "in_time": False},
            "The workflow is done 0.1 s after its deadline, not in time.",
        ),
        ({"what": "writing", "step": "explore-1"}, ""),
    ],
)
def test_each_event_is_told_in_words(event, told):
    assert in_words(event, 60) == told


def test_one_step_or_several_are_being_written():
    assert being_written(["explore-1"]) == "explore-1 is being written"
    assert being_written(["explore-1", "explore-2"]) == "explore-1 and explore-2 are being written"


def test_tokens_are_computed_by_engines_that_were_asked():
    row = {"prompt_tokens": 100, "output_tokens": 20, "attempts": 1}
    assert (computed(row), computed(row | {"attempts": 0}), prefilled(ANSWERED)) == (120, 0, 10)
    assert [went_on({"decisions": [{"reason": each}]}) for each in ("from_checkpoint", "sooner_again")] == [True, False]


def test_without_a_running_system_it_says_what_to_start(tmp_path):
    with pytest.raises(StoryFailed, match=r"credentials.json is missing: start `make up` first, or set DATA_DIR"):
        place_of(tmp_path)


class Engine(BaseHTTPRequestHandler):
    """Says that checkpoints pin seven blocks."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"# TYPE {story.PINNED} gauge\n{story.PINNED} 7.0\n".encode())

    def log_message(self, *about: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a system without engines."""
    (tmp_path / "credentials.json").write_text(json.dumps({"api_key": "sk-1", "model": "demo"}))
    (tmp_path / "ports.json").write_text(json.dumps({"gateway": 1, "console": 2}))
    (tmp_path / "engines").mkdir()
    return tmp_path


def says(folder: Path, name: str, url: str, state: str = "ready") -> None:
    (folder / "engines" / f"{name}.state.json").write_text(json.dumps({"url": url, "state": state}))


def test_addresses_and_engines_that_are_ready_are_read_from_the_folder(folder: Path) -> None:
    for name, state in (("a", "ready"), ("b", "exited")):
        says(folder, name, f"http://{name}", state)
    place = place_of(folder)
    assert (place.gateway, place.console) == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert (place.api_key, place.model, place.engines()) == ("sk-1", "demo", ["http://a"])


def test_an_engine_that_was_stopped_since_holds_no_kv_and_a_new_one_counts(folder: Path, engine: str) -> None:
    says(folder, "stopped", f"http://127.0.0.1:{free_port()}")
    place = place_of(folder)
    (folder / "engines" / "stopped.state.json").unlink()
    assert place.pinned() == 0
    says(folder, "new", engine)
    assert place.pinned() == 7


def test_an_engine_that_has_just_ended_is_asked_until_its_state_says_so(folder: Path, engine: str) -> None:
    says(folder, "serves", engine)
    says(folder, "ended", f"http://127.0.0.1:{free_port()}")
    later = threading.Timer(1.0, (folder / "engines" / "ended.state.json").unlink)
    later.start()
    assert place_of(folder).pinned() == 7
    later.join()


def test_an_engine_that_is_said_to_be_ready_and_does_not_listen_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "PATIENCE_S", 0.5)
    says(folder, "silent", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(requests.ConnectionError):
        place_of(folder).pinned()
