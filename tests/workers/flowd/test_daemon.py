"""The transfer daemon as clients meet it: a real process or a real socket, and what becomes of transfers without it."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from controller.core.errors import ConfigError
from controller.flow.gate import Gate
from tests.waiting import until_on_loop
from tests.workers.flowd.running import MB, WAIT_S, connected, nothing, sending, serving, turns
from workers.flowd import client as flow_client
from workers.flowd import daemon as flow_daemon
from workers.flowd.addresses import own_addresses
from workers.flowd.client import SCHEDULED, Flow, FlowClient
from workers.flowd.settings import settings_from


class Raw:
    """A client that says what the test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, path: str) -> Raw:
        return cls(*await asyncio.open_unix_connection(path))

    def say(self, **message: Any) -> None:
        self.writer.write(orjson.dumps(message) + b"\n")

    async def hear(self) -> dict[str, Any]:
        """The next message, apart from signs of life and the policy."""
        async with asyncio.timeout(WAIT_S):
            while True:
                said: dict[str, Any] = orjson.loads(await self.reader.readline())
                if said["event"] not in ("alive", "policy"):
                    return said

    async def asked(self, **message: Any) -> dict[str, Any]:
        self.say(**message)
        return await self.hear()


def submitted(**changed: Any) -> dict[str, Any]:
    given = {"op": "submit", "id": "a", "stage": 3, "size_bytes": MB, "to": "host", "due_in_s": 5.0}
    return {name: value for name, value in (given | changed).items() if value is not None}


WRONG = {
    "size_bytes": [{"size_bytes": 0}, {"size_bytes": -1}, {"size_bytes": "1"}, {"size_bytes": None}],
    "stage": [{"stage": 0}, {"stage": 5}, {"stage": True}, {"stage": "kv"}],
    "due_in_s": [{"due_in_s": 2e6}, {"due_in_s": 0}, {"due_in_s": -2.5}, {"due_in_s": None}, {"due_in_s": "soon"}],
    "id": [{"id": ""}, {"id": None}, {"id": 7}, {"id": "x" * 501}],
    "to": [{"to": ""}, {"to": None}],
    "later_bytes": [{"later_bytes": -1}],
    "over": [{"over": "rdma"}, {"over": 7}],
    "layer": [{"layer": -1}, {"layer": 1.5}],
    "requests": [{"requests": "r"}, {"requests": [1]}],
    "unit": [{"stage": 1}],
    "op": [{"op": "sbmit"}, {"op": None}],
}


@pytest.mark.parametrize(("field", "changed"), [(field, each) for field, all_ in WRONG.items() for each in all_])
async def test_wrong_submits_get_an_error_that_names_the_field(path, field, changed):
    async with serving(path):
        raw = await Raw.open(path)
        said = await raw.asked(**submitted(**changed))
        assert (said["event"], said["field"]) == ("error", field), said
        assert said["message"]
        assert (await raw.asked(**submitted()))["event"] == "permit", "the connection goes on"


@pytest.mark.parametrize("raw_number", ["1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, "1e308"])
@pytest.mark.parametrize("field", ["size_bytes", "due_in_s", "later_bytes"])
async def test_numbers_that_no_clock_or_link_knows_stop_nobody(path, field, raw_number):
    async with serving(path), connected(path) as client:
        raw = await Raw.open(path)
        line = orjson.dumps(submitted(**{field: 12345.0})).replace(b"12345.0", raw_number.encode())
        raw.writer.write(line + b"\n")
        said = await raw.hear()
        assert said["field"] in (field, ""), said
        flow = client.submit(3, MB, "host", 1.0)
        await flow.turn(nothing)
        assert flow.scheduled
        flow.end()


async def test_a_line_without_end_costs_its_own_connection_only(path):
    async with serving(path), connected(path) as client:
        raw = await Raw.open(path)
        raw.writer.write(b"x" * (flow_daemon.MAX_LINE + 10_000))
        async with asyncio.timeout(WAIT_S):
            while await raw.reader.readline():
                pass
        flow = client.submit(3, MB, "host", 1.0)
        await flow.turn(nothing)
        assert flow.scheduled


@pytest.mark.parametrize("policy", ["mfs", "earliest_deadline", "shortest_first"])
async def test_a_transfer_whose_deadline_passes_while_it_is_held_goes_on(path, policy, monkeypatch):
    """It was due first when it was submitted; it is late, and others are due later."""
    monkeypatch.setattr(flow_client, "LATE_S", 0.3)
    monkeypatch.setattr(flow_client, "MOST_HELD_S", 3.0)
    async with serving(path, policy), connected(path) as client, sending(client, due_in_s=0.3):
        late = client.submit(3, MB, "host", 0.4)
        await late.turn(nothing)
        assert late.held_s < 5.0
        assert late.reason in (SCHEDULED, "held_too_long")
        late.end()


async def test_a_transfer_that_is_late_already_is_scheduled(path):
    async with serving(path), connected(path) as client:
        flow = client.submit(3, MB, "host", -5.0)
        await flow.turn(nothing)
        assert flow.scheduled
        assert flow.level


async def test_duplicates_and_flows_of_others_are_refused(path):
    async with serving(path):
        one, two = await Raw.open(path), await Raw.open(path)
        assert (await one.asked(**submitted()))["go"] is True
        for raw in (one, two):
            assert (await raw.asked(**submitted()))["field"] == "id"
        for op in ("progress", "urgent", "completion"):
            assert (await two.asked(op=op, id="a", left=1))["field"] == "id"
        assert (await one.asked(op="progress", id="a", left="x"))["field"] == "left"
        one.writer.write(b"no json\n")
        assert "not JSON" in (await one.hear())["message"]
        assert [flow["id"] for flow in (await two.asked(op="status"))["flows"]] == ["a"]


async def test_permits_are_pushed_in_order_of_deadlines(path):
    async with serving(path, "earliest_deadline"):
        raw = await Raw.open(path)
        assert await raw.asked(**submitted(id="late", due_in_s=60.0)) == {
            "event": "permit", "id": "late", "go": True, "level": 1, "class": 0,
        }  # fmt: skip
        raw.say(**submitted(id="early", due_in_s=1.0))
        told = {said["id"]: said["go"] for said in (await raw.hear(), await raw.hear())}
        assert told == {"late": False, "early": True}
        said = await raw.asked(op="completion", id="early")
        assert (said["id"], said["go"]) == ("late", True)


async def test_a_transfer_is_promoted_in_time_and_told_so(path):
    async with serving(path), connected(path) as client:
        flow = client.submit(3, 10 * MB, "host", 3.0)
        await until_on_loop(lambda: flow.level)
        first = flow.level
        assert first > 1, "10 MiB over 100 MiB/s in 3 s are no hurry"
        while flow.level > 1:
            flow.waits(True)
            await asyncio.sleep(0.05)
        assert flow.promotions == first - 1


@pytest.mark.parametrize(
    ("field", "changed"),
    [("unit", {"unit": ""}), ("batch", {"batch": 3}), ("layer", {"layer": -1}), ("layer", {"layer": 0.5})],
)
async def test_wrong_layers_get_an_error_that_names_the_field(path, field, changed):
    async with serving(path):
        raw = await Raw.open(path)
        said = await raw.asked(**{"op": "layer", "unit": "u", "batch": "b", "layer": 0, **changed})
        assert (said["event"], said["field"]) == ("error", field), said


@pytest.mark.parametrize("layer", [-1, 0.5, True, "2", None])
async def test_a_wrong_layer_of_progress_is_named(path, layer):
    async with serving(path):
        raw = await Raw.open(path)
        assert (await raw.asked(**submitted()))["event"] == "permit"
        said = await raw.asked(op="progress", id="a", left=1, layer=layer)
        assert (said["event"], said["id"], said["field"]) == ("error", "a", "layer"), said


async def test_a_layer_counts_beside_any_other_news_of_progress(path, monkeypatch):
    needed: list[int] = []
    monkeypatch.setattr(Gate, "needed_by", lambda gate, flow_id, layer: needed.append(layer))
    async with serving(path):
        raw = await Raw.open(path)
        assert (await raw.asked(**submitted()))["event"] == "permit"
        for waiting, layer in ((False, 1), (True, 2), (True, 3)):
            raw.say(op="progress", id="a", left=1, waiting=waiting, layer=layer)
        assert (await raw.asked(op="status"))["event"] == "status"
    assert needed == [1, 2, 3]


async def test_no_client_computes_more_batches_than_it_may(path, monkeypatch):
    monkeypatch.setattr(flow_daemon, "MOST_BATCHES", 2)
    async with serving(path):
        raw = await Raw.open(path)
        for batch in ("a", "b", "a", "c"):
            raw.say(op="layer", unit="u", batch=batch, layer=0)
        assert (await raw.hear())["field"] == "batch"
        raw.say(op="computed", unit="u", batch="a")
        raw.say(op="layer", unit="u", batch="c", layer=0)
        assert (await raw.asked(op="status"))["event"] == "status"


@pytest.mark.parametrize("how", ["a layer begins", "it is computed", "its engine goes away"])
async def test_a_transfer_whose_batch_computes_is_promoted_at_its_layers(path, how):
    async with serving(path), connected(path) as client:
        engine = await Raw.open(path)
        engine.say(op="layer", unit=client._name, batch="7", layer=0)
        assert (await engine.asked(op="status"))["flows"] == []
        flow = client.submit(3, 10 * MB, "host", 1.5, batch="7")
        await until_on_loop(lambda: flow.level)
        first = flow.level
        for _ in range(20):
            flow.waits(True)
            await asyncio.sleep(0.05)
        assert flow.level == first, "it is more urgent by far, but no layer began"
        match how:
            case "a layer begins":
                engine.say(op="layer", unit=client._name, batch="7", layer=1)
            case "it is computed":
                engine.say(op="computed", unit=client._name, batch="7")
            case _:
                engine.writer.close()
        await until_on_loop(lambda: flow.level < first)
        flow.end()


async def test_a_client_that_never_completes_loses_its_permit(path, monkeypatch):
    monkeypatch.setattr(flow_client, "STILL_S", 0.1)  # the other one says that it is there
    async with serving(path, "earliest_deadline", lease_s=1.0), connected(path) as client:
        raw = await Raw.open(path)
        assert (await raw.asked(**submitted(due_in_s=1.0)))["go"] is True
        flow = client.submit(3, MB, "host", 30.0)
        await flow.turn(nothing)
        assert flow.scheduled
        assert flow.held_s > 0.2
        assert (await raw.hear())["event"] == "expired"


async def test_a_client_that_goes_away_ends_its_transfers(path):
    async with serving(path, "earliest_deadline"), connected(path) as client:
        raw = await Raw.open(path)
        await raw.asked(**submitted(due_in_s=1.0))
        raw.writer.close()
        flow = client.submit(3, MB, "host", 30.0)
        await flow.turn(nothing)
        assert flow.reason == SCHEDULED


async def test_a_held_transfer_says_so_and_short_memory_promotes_it(path, monkeypatch):
    monkeypatch.setattr(flow_client, "STILL_S", 0.05)
    async with serving(path, "earliest_deadline"), connected(path) as client, sending(client) as first:
        second = client.submit(3, MB, "host", 30.0)
        said = 0

        async def still() -> None:
            nonlocal said
            said += 1

        await second.turn(still, pressed=lambda: said >= 2)
        assert said >= 2
        assert second.scheduled
        waiting = asyncio.ensure_future(first.turn(nothing))
        await turns()
        assert not waiting.done(), "the promotion of the one holds the other"
        second.end()
        await waiting
        assert first.scheduled


async def test_holding_has_an_end(path, monkeypatch):
    monkeypatch.setattr(flow_client, "MOST_HELD_S", 0.5)
    async with serving(path, "earliest_deadline"), connected(path) as client, sending(client):
        second = client.submit(3, MB, "host", 30.0)
        await second.turn(nothing)
        assert second.reason == "held_too_long"
        assert 0.5 <= second.held_s < 2.0


async def test_a_weight_load_is_held_for_longer_in_total_than_at_once(path, monkeypatch):
    """Its floor lets it go again and again, so that the end of holding is none of a KV transfer's."""
    monkeypatch.setattr(flow_client, "MOST_HELD_S", 1.5)
    async with serving(path, slice_s=0.05) as daemon, connected(path) as client, sending(client):
        load = client.submit(4, 100 * MB, "host", None)
        while load.held_s < 2.0:
            await load.turn(nothing)
            load.sent(MB)
            await asyncio.sleep(0.01)
        assert load.scheduled
        (flow,) = [each for each in daemon.status()["flows"] if each["stage"] == 4]
        assert flow["due_in_s"] is None
        load.end()


async def test_what_is_read_from_memory_is_not_held_for_the_link(path):
    async with serving(path), connected(path) as client, sending(client):
        load = client.submit(4, MB, "engine", None, over=flow_client.MEMORY)
        await load.turn(nothing)
        assert (load.reason, load.held_s < flow_client.ANSWER_S) == (SCHEDULED, True)
        load.end()


# ---- without a daemon -----------------------------------------------------------------------------------------------


class Process:
    """`python -m workers.flowd`, in a process that the test may kill, stop and start again."""

    def __init__(self, path: str) -> None:
        env = {**os.environ, "FLOW_POLICY": "earliest_deadline", "FLOW_SOCKET": path, "FLOW_LINK_GBPS": "1"}
        self.process = subprocess.Popen([sys.executable, "-m", "workers.flowd"], env=env)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)


async def held(client: FlowClient) -> tuple[Flow, asyncio.Task[None]]:
    """A transfer that is held because another one goes."""
    first, second = client.submit(3, MB, "host", 1.0), client.submit(3, MB, "host", 30.0)
    await first.turn(nothing)
    waiting = asyncio.ensure_future(second.turn(nothing))
    await until_on_loop(lambda: second.level)
    assert not waiting.done()
    return second, waiting


async def test_without_a_daemon_a_transfer_goes_at_once(path):
    client = FlowClient(path)
    client.start()
    flow = client.submit(3, MB, "host", 1.0)
    async with asyncio.timeout(0.2):
        await flow.turn(nothing)
    assert (flow.reason, flow.held_s) == ("unavailable", 0.0)
    flow.end()
    client.close()


async def test_a_killed_daemon_lets_transfers_go_and_the_next_one_schedules_again(path):
    with Process(path) as daemon:
        async with connected(path) as client:
            flow, waiting = await held(client)
            daemon.signal(signal.SIGKILL)
            async with asyncio.timeout(2.0):
                await waiting
            assert flow.reason == "lost"
            with Process(path):  # over the socket that the killed one left
                await until_on_loop(lambda: client.connected)
                again = client.submit(3, MB, "host", 1.0)
                await again.turn(nothing)
                assert again.reason == SCHEDULED


async def test_a_daemon_that_is_restarted_at_once_does_not_take_up_what_was_held(path):
    """It cannot know how far that is: it goes on, and its completion names nothing that the new daemon knows."""
    with Process(path) as daemon:
        async with connected(path) as client:
            flow, waiting = await held(client)
            daemon.signal(signal.SIGKILL)
            with Process(path):
                async with asyncio.timeout(5.0):
                    await waiting
                assert flow.reason == "lost"
                await until_on_loop(lambda: client.connected)
                flow.sent(MB)
                flow.end()
                again = client.submit(3, MB, "host", 1.0)
                await again.turn(nothing)
                assert again.scheduled
                raw = await Raw.open(path)
                assert [each["id"] for each in (await raw.asked(op="status"))["flows"]] == [again.id]


async def test_a_daemon_that_hangs_and_goes_on_again_schedules_again(path):
    with Process(path) as daemon:
        async with connected(path) as client:
            flow, waiting = await held(client)
            daemon.signal(signal.SIGSTOP)
            async with asyncio.timeout(flow_client.SILENCE_S + 3.0):
                await waiting
            assert flow.reason == "silent"
            daemon.signal(signal.SIGCONT)
            await until_on_loop(lambda: client.connected)
            again = client.submit(3, MB, "host", 1.0)
            await again.turn(nothing)
            assert again.scheduled


async def test_a_daemon_that_hangs_holds_nobody_for_long(path, monkeypatch):
    with Process(path) as daemon:
        async with connected(path) as client:
            flow, waiting = await held(client)
            daemon.signal(signal.SIGSTOP)
            late = client.submit(3, MB, "host", 1.0)
            async with asyncio.timeout(2.0):
                await late.turn(nothing)
            async with asyncio.timeout(flow_client.SILENCE_S + 2.0):
                await waiting
            assert (late.reason, flow.reason) == ("no_answer", "silent")
            daemon.signal(signal.SIGCONT)


async def test_a_daemon_that_is_stopped_removes_its_socket_and_a_second_one_is_refused(path):
    with Process(path) as daemon:
        await until_on_loop(lambda: Path(path).exists())
        async with connected(path):
            assert oct(Path(path).stat().st_mode & 0o777) == "0o600"
            with Process(path) as second:
                assert await asyncio.to_thread(second.process.wait, WAIT_S) == 1
        daemon.signal(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.process.wait, WAIT_S) == 0
        assert not Path(path).exists()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"FLOW_POLICY": "karuna"}, "FLOW_POLICY"),
        ({"FLOW_POLICY": "mfs"}, "FLOW_SOCKET"),
        ({"FLOW_POLICY": "mfs", "FLOW_SOCKET": "/" + "x" * 120}, "FLOW_SOCKET"),
        ({"FLOW_LINK_GBPS": "fast"}, "FLOW_LINK_GBPS"),
        ({"FLOW_LINK_GBPS": "0"}, "FLOW_LINK_GBPS"),
        ({"FLOW_HOST": "a host"}, "FLOW_HOST"),
        ({"FLOW_HOST": "x" * 121}, "FLOW_HOST"),
    ],
)
def test_wrong_settings_name_their_variable(given, field):
    with pytest.raises(ConfigError) as raised:
        settings_from(given)
    assert raised.value.field == field
    assert field in str(raised.value)


def test_scheduling_is_off_by_default():
    found = settings_from({})
    assert (found.policy, found.bandwidth, found.socket, found.redis_url) == ("off", 1.25e9, "", "")


def test_a_host_has_the_machines_name_unless_it_is_given_the_one_that_the_console_has():
    assert settings_from({}).host == platform.node()
    assert settings_from({"FLOW_HOST": "gpu-1.example"}).host == "gpu-1.example"


def test_a_host_says_where_it_receives_only_if_its_bandwidth_was_set(tmp_path):
    (tmp_path / "fib_trie").write_text(
        "|-- 127.0.0.1\n /32 host LOCAL\n|-- 10.0.0.7\n /32 host LOCAL\n|-- 10.0.0.255\n /32 link BROADCAST\n"
    )
    (tmp_path / "if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80 lo\nfd000000000000000000000000000007 02 40 00 80 eth0\n"
    )
    assert own_addresses(tmp_path) == ("10.0.0.7", "fd00::7")
    assert own_addresses(tmp_path / "nothing") == ()
    assert settings_from({}).receives_at == ()
    assert settings_from({"FLOW_LINK_GBPS": "25"}).receives_at == own_addresses()


async def test_a_client_hears_how_long_the_link_takes_for_what_is_queued(path):
    async with serving(path), connected(path) as client:
        assert await client.queue_s() == 0.0
        flow = client.submit(3, 200 * MB, "host", 9.0)
        await flow.turn(nothing)
        assert await client.queue_s() == pytest.approx(2.0)
        flow.end()
        assert await client.queue_s() == 0.0


async def test_nothing_is_queued_where_no_daemon_answers(path, monkeypatch):
    assert await flow_client.FlowClient(path).queue_s() == 0.0
    async with serving(path), connected(path) as client:
        monkeypatch.setattr(client, "say", lambda message: None)
        assert await client.queue_s() == 0.0
        assert client._asked == {}


async def test_a_daemon_that_does_not_know_the_question_costs_no_wait(path, monkeypatch):
    """Of an older version."""
    monkeypatch.setattr(flow_client, "QUEUE_S", 600.0)
    async with serving(path), connected(path) as client:
        say = client.say
        monkeypatch.setattr(client, "say", lambda message: say({**message, "op": "unknown"}))
        assert await asyncio.wait_for(client.queue_s(), WAIT_S) == 0.0
