"""What bench-scaleout makes of its rounds, and what it leaves out."""

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from benchmarks import bench_scaleout
from benchmarks.bench_scaleout import (
    NO_COPY,
    ScaleoutFleet,
    engines,
    lacks_room,
    main,
    measured,
    parse,
    tpot_alone,
    tpot_ms,
    two_devices,
)
from benchmarks.scaleout.medium import memory_stream, raw_stream
from benchmarks.scaleout.report import ratios, summary, table
from workers.engine.weights.host_copy import NoCopy


def one(load_s, first_s, tpot=None):
    return {"load_s": load_s, "first_served_s": first_s, "bytes": 1e9, "source_tpot_ms": tpot}


ROUNDS = {
    "disk": [one(2.0, 2.2, 110.0), one(2.4, 2.6), one(2.2, 9.0, 130.0)],
    "host": [one(0.5, 0.6, 111.0)] * 3,
    "engine": [one(0.8, 1.0, 140.0), one(1.0, 1.3, 150.0), one(1.2, 1.4, 160.0)],
}
NO_STREAMS: dict[str, list[float]] = {"answering": [], "idle": [], "memory": []}


def test_medians_ratios_and_shares():
    streams = {"answering": [2.0, 4.0, 2.5], "idle": [5.0, 5.0, 5.0], "memory": [1.0, 1.25, 1.5]}
    found = summary(ROUNDS, streams, alone=100.0, size=1_000_000_000)
    assert found["load_s"] == {"disk": 2.2, "host": 0.5, "engine": 1.0}
    assert found["first_served_s"] == {"disk": 2.6, "host": 0.6, "engine": 1.3}
    assert found["ratios"]["first_served_s"] == {"disk/host": 4.33, "disk/engine": 2.0, "host/engine": 0.46}
    assert found["ratios"]["load_s"] == {"disk/host": 4.4, "disk/engine": 2.2, "host/engine": 0.5}
    assert found["link_share"] == pytest.approx(0.4)  # 1 GB/s of 2.5
    assert found["link_share_idle"] == pytest.approx(0.2)
    assert found["link_share_memory"] == pytest.approx(0.8)
    assert found["source_tpot_ms"] == {"alone": 100.0, "disk": 120.0, "host": 111.0, "engine": 150.0}
    assert found["rounds"] == 3


def test_the_table_has_every_source_the_ratios_and_the_share():
    said = table(summary(ROUNDS, {"answering": [2.5], "idle": [5.0], "memory": [1.25]}, 100.0, 1_000_000_000))
    for part in ("disk/host 4.33, disk/engine 2.00, host/engine 0.46", "40 % of the bare medium", "20 % of it idle"):
        assert part in said
    assert "80 % of a stream from memory to memory" in said
    assert [line.split()[0] for line in said.splitlines()[2:5]] == ["disk", "host", "engine"]


def test_sources_without_an_engine_have_no_share_of_the_medium():
    found = summary({kind: ROUNDS[kind] for kind in ("disk", "host")}, NO_STREAMS, 100.0, 1_000_000_000)
    assert found["link_share"] is found["link_share_idle"] is found["link_share_memory"] is None
    assert found["raw_gb_per_s"] == {"answering": None, "idle": None, "memory": None}
    assert "engine to engine" not in table(found)


def test_a_load_too_short_for_a_token_has_no_tpot():
    found = summary({"host": [one(0.1, 0.2)]}, NO_STREAMS, 100.0, 1_000_000_000)
    assert found["source_tpot_ms"]["host"] is None
    assert table(found).splitlines()[2].endswith(" -")


def test_tpot_counts_gaps_inside_the_load_and_not_those_between_answers():
    answers = [[0.0, 1.0, 1.1, 1.3], [5.0, 5.2, 9.0]]
    assert tpot_ms(answers, 0.5, 6.0) == pytest.approx(1e3 * (0.1 + 0.2 + 0.2) / 3)
    assert tpot_ms(answers, 1.35, 4.0) is None


def test_ratios_leave_out_what_was_not_measured():
    assert ratios({"disk": 3.0, "host": None, "engine": 1.5}) == {"disk/engine": 2.0}


@pytest.mark.parametrize("size", [1000, 16 << 20, (16 << 20) + 5])
@pytest.mark.parametrize("stream", [raw_stream, memory_stream])
def test_the_bare_stream_brings_every_byte(stream, size):
    assert stream(size) > 0


@pytest.mark.parametrize(("said", "names"), [(None, ["0", "1"]), ("2,3,5", ["2", "3"]), ("", ["0", "1"])])
def test_engines_take_the_devices_that_the_benchmark_may_use(said, names):
    assert two_devices({} if said is None else {"CUDA_VISIBLE_DEVICES": said}) == names


# ---- the copy in host memory ----------------------------------------------------------------------------------------


@pytest.mark.torch
def test_the_folder_for_the_copy_is_an_argument_and_must_be_one(tmp_path, capsys):
    assert parse(["--host-copy", str(tmp_path)]).host_copy == tmp_path
    with pytest.raises(SystemExit):
        parse(["--host-copy", str(tmp_path / "none")])
    assert f"--host-copy: {tmp_path / 'none'} is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("free", "held", "lacks"), [(200, 0, False), (199, 0, True), (399, 200, True)])
def test_a_copy_wants_twice_its_size_and_what_the_engines_take(monkeypatch, tmp_path, free, held, lacks):
    monkeypatch.setattr(bench_scaleout, "room", lambda base: free * 10**7)
    why = lacks_room(tmp_path, 100 * 10**7, held * 10**7)
    assert bool(why) == lacks
    if lacks:
        assert f"a copy of 1.00 GB wants {2 + held / 100:.2f} GB free at {tmp_path}" in why


@pytest.mark.torch
@pytest.mark.parametrize("shared", [True, False])
def test_engines_share_a_copy_only_where_there_is_room(monkeypatch, tmp_path, shared):
    started = []

    @contextmanager
    def engine(count, logs, *options, **placed):
        started.append(options)
        yield [SimpleNamespace(url="", log=logs)]

    monkeypatch.setattr(bench_scaleout, "reference_engines", engine)
    args = parse(["--host-copy", str(tmp_path)])
    with engines(args, tmp_path / "model", tmp_path / "logs", False, shared, None):
        pass
    assert len(started) == 2
    for options in started:
        assert ("--host-copy" in options) == shared
        assert (str(tmp_path) in options) == shared


def fleet_whose_source_logs(monkeypatch, tmp_path, text, host_copy):
    (tmp_path / "log").write_text(text)
    looks = []

    def answer(url, timeout):
        looks.append(url)
        return SimpleNamespace(status_code=200, json=lambda: {"host_copy": host_copy(len(looks))})

    monkeypatch.setattr(bench_scaleout.requests, "get", answer)
    monkeypatch.setattr(bench_scaleout.time, "sleep", lambda seconds: None)
    return ScaleoutFleet(
        SimpleNamespace(log=tmp_path / "log"), SimpleNamespace(url="http://warm"), "token", "big"
    ), looks


def test_a_copy_that_the_engine_gives_up_is_waited_for_no_longer(monkeypatch, tmp_path):
    text = f"INFO loaded\nWARNING workers.engine {NO_COPY}: no space\nINFO serves\n"
    fleet, looks = fleet_whose_source_logs(monkeypatch, tmp_path, text, lambda look: False)
    assert fleet.no_copy() == f"{NO_COPY}: no space"
    assert len(looks) == 1


def test_a_copy_that_comes_is_no_reason_and_one_that_never_does_is(monkeypatch, tmp_path):
    fleet, looks = fleet_whose_source_logs(monkeypatch, tmp_path, "INFO loaded\n", lambda look: look > 3)
    assert (fleet.no_copy(), len(looks)) == ("", 4)
    fleet, looks = fleet_whose_source_logs(monkeypatch, tmp_path, "", lambda look: False)
    assert fleet.no_copy(within_s=0.0) == "no copy in host memory within 0 s"


@pytest.mark.torch
def test_the_words_that_are_looked_for_are_the_engines(monkeypatch, caplog):
    from workers.engine.torch.weights import store

    weights = object.__new__(store.TorchWeights)
    copy = SimpleNamespace(whole=lambda: None)
    weights.memory = SimpleNamespace(entries=list, blocks=list)
    for error in (NoCopy("no room"), OSError("broken")):

        def write(*args, error=error):
            raise error

        copy.write = write
        caplog.clear()
        weights._write(copy, "key")
        assert NO_COPY in caplog.text


def stand_in(monkeypatch, **others):
    """For what takes a model, engines and a medium: a model of 1 GB, for whose copy there is no room."""
    instead = {
        "random_model": lambda args, folder, context: (folder, 10**9),
        "room": lambda base: 10**8,
        "tpot_alone": lambda fleet: 100.0,
        "one_round": lambda fleet, kind, folder: one(1.0, 1.2),
        "raw_stream": lambda size: 2.0,
        "while_answering": lambda fleet, measure: measure(),
    }
    for name, what in {**instead, **others}.items():
        monkeypatch.setattr(bench_scaleout, name, what)


@pytest.mark.torch
def test_a_source_that_is_left_out_is_said_in_the_line_of_json_and_in_the_table(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FLEET_TOKEN", "")  # which it sets
    started = []

    @contextmanager
    def pair(args, model, logs, apart, copies, other):
        started.append(copies)
        yield SimpleNamespace(url="", log=logs), SimpleNamespace(url="")

    stand_in(monkeypatch, engines=pair, memory_stream=lambda size: 1.5, stop_on_sigterm=lambda: None)
    monkeypatch.setattr(sys, "argv", ["bench", "--host-copy", str(tmp_path), "--rounds", "2"])
    main()
    said = capsys.readouterr().out.splitlines()
    result = json.loads(said[-1])
    assert started == [False]
    assert set(result["load_s"]) == {"disk", "engine"}
    why = f"a copy of 1.00 GB wants 4.00 GB free at {tmp_path} and in memory: 0.10 GB"
    assert result["left_out"] == {"host": why}
    assert (result["medium"], result["device_gb_per_s"]) == ("TCP", {})
    assert said[-2] == f"host left out: {why}"


def test_copies_with_the_host_stand_in_the_table():
    found = summary(ROUNDS, NO_STREAMS, 100.0, 1_000_000_000)
    said = table(found | {"device_gb_per_s": {"to_host": 24.5, "to_device": 50.25}})
    assert said.endswith("copies of the device with pinned memory: 24.50 GB/s to the host, 50.25 GB/s from it")


@pytest.mark.torch
@pytest.mark.parametrize(("count", "medium", "apart"), [(1, "shared", False), (2, "apart", True)])
def test_with_one_device_the_engines_share_it_and_the_medium_is_tcp(monkeypatch, tmp_path, count, medium, apart):
    placed, copied = [], []

    @contextmanager
    def pair(args, model, logs, apart, copies, other):
        placed.append(apart)
        yield SimpleNamespace(url="", log=logs), SimpleNamespace(url="")

    copy = lambda size, *way: copied.append(way) or 40.0  # noqa: E731
    stand_in(monkeypatch, engines=pair, devices=lambda device: count, device_copy=copy)
    args = SimpleNamespace(device="cuda", shape="tiny", dtype="bfloat16", host_copy=tmp_path, rounds=1)
    result = measured(args, tmp_path, None, "token")
    assert (result["medium"], placed) == (bench_scaleout.MEDIA[medium], [apart])
    assert set(result["load_s"]) == {"disk", "engine"}
    assert result["raw_gb_per_s"]["idle"] == (40.0 if apart else 2.0)
    assert result["device_gb_per_s"] == {"to_host": 40.0, "to_device": 40.0}
    assert (("cuda:0", "cuda:1") in copied) == apart


def test_the_first_answer_of_an_engine_is_not_its_tpot_alone():
    answers = iter([[0.0, 5.0], [10.0, 10.1, 10.2]])
    fleet = SimpleNamespace(source=None, first_token_at=lambda engine, tokens, times: times.extend(next(answers)))
    assert tpot_alone(fleet) == pytest.approx(100.0)
