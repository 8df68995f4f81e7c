"""What live gateways recorded of their schedulers, replayed through the driver of simulations: the same actions follow.

The logs were made by `python -m benchmarks.scheduler_logs tests/controller/simulator/logs`.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from controller.core.errors import ConfigError
from controller.dispatch.event_log import Log
from controller.simulator import __main__ as command
from controller.simulator.replay import Replay

LOGS = Path(__file__).parent / "logs"
RUNS = {
    "collocated": {"Send"},
    "disaggregated": {"Send", "Place", "AnswerThere"},
    "failures": {"Send", "Place", "Abort", "FreeKv", "Retry", "Drop", "Fail"},
    "operated": {"Send", "Refuse", "Drop"},
    "stranded": {"Send", "Place", "PrefillAgain", "FreeKv", "GiveUp", "LeftToLease"},
}
TOLD = {
    "operated": {'"pause"', '"resume"', '"reprioritise"', '"cancel"', '"InstanceDraining"', '"Expected"'},
}


def lines(name: str) -> list[str]:
    return gzip.decompress((LOGS / f"{name}.jsonl.gz").read_bytes()).decode().splitlines(keepends=True)


@pytest.mark.parametrize("name", RUNS)
def test_the_log_of_a_live_run_is_answered_alike(name: str) -> None:
    replay = Replay(Log(lines(name)))
    assert list(replay.differences()) == []
    assert replay.batches == len(lines(name)) - 1 > 50
    assert RUNS[name] <= replay.kinds.keys()


@pytest.mark.parametrize("name", TOLD)
def test_the_log_has_what_operators_do(name: str) -> None:
    text = "".join(lines(name))
    assert {each for each in TOLD[name] if each not in text} == set()


def test_the_failures_of_a_live_run_were_retried() -> None:
    replay = Replay(Log(lines("failures")))
    assert not list(replay.differences())
    arrived = sum(line.count('["Arrived"') for line in lines("failures"))
    assert replay.kinds["Send"] > arrived - replay.kinds["Refuse"] - replay.kinds["Drop"]


@pytest.mark.parametrize("name", RUNS)
def test_logs_are_small(name: str) -> None:
    assert (LOGS / f"{name}.jsonl.gz").stat().st_size < 200_000


def test_another_policy_answers_otherwise() -> None:
    header, *rest = lines("collocated")
    other = json.dumps(json.loads(header) | {"policy": "round_robin"})
    assert list(Replay(Log([other, *rest])).differences())


def test_a_wake_up_at_another_time_is_a_difference() -> None:
    """It is the other half of the scheduler's reply: a gateway that sleeps too long keeps requests waiting."""
    raw = lines("failures")
    index = next(i for i, line in enumerate(raw) if i and json.loads(line)["wake_at"] is not None)
    batch = json.loads(raw[index])
    raw[index] = json.dumps(batch | {"wake_at": batch["wake_at"] + 1.0}) + "\n"
    (found,) = Replay(Log(raw)).differences()
    assert (found.batch, found.logged[0] == found.answered[0]) == (index, True)
    assert found.logged[1] == found.answered[1] + 1.0


def test_the_command_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(lines("collocated")))
    assert command.main(["replay", str(path)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["different"] == 0
    path.write_text("".join(lines("collocated")).replace('"fits_budget"', '"a whim"', 1))
    assert command.main(["replay", str(path)]) == 1
    assert "a whim" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "no JSON", '{"log": "another", "version": 1}'])
def test_what_is_no_log_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError):
        Log([text])
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    assert command.main(["replay", str(path)]) == 2
    assert "log" in capsys.readouterr().err
