"""What bench-scaleout makes of its rounds."""

import pytest

from benchmarks.bench_scaleout import ratios, summary, table, tpot_ms, two_devices
from benchmarks.medium import memory_stream, raw_stream


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


def test_one_device_moves_nothing_between_engines_and_says_no_share():
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
