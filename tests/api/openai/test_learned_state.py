"""What a gateway learned survives its process; nothing that cannot be trusted is used."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from api.openai.learned_state import (
    FRAMES_S,
    FRAMES_VERSION,
    LATENCY_S,
    LENGTHS_S,
    MOST_MEASURED,
    MOST_REQUESTS,
    LearnedFile,
    LearnedState,
)
from controller.core import events as ev
from controller.core.policy import Replica
from controller.core.snapshot import MappingConfig
from controller.core.types import LatencyCoefficients, Request, Targets
from controller.policies.ordering.calm import CUTOFFS, CalmOrdering
from controller.predict.answer_lengths import LengthsInForce
from controller.predict.lengths import PromptText
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.controller.predict.test_answer_lengths import forest
from tests.controller.slo.test_classes import MAPPING
from tests.waiting import until_on_loop
from workers.backends.fake import Script

SHOWN = ("tenant", "slo_class", "finished", "attained", "ttft_p50_s", "goodput_tokens")
KIND = ("acme", "chat", "demo")
TEXT = PromptText(chars=400, messages=0)
PROFILE = LatencyCoefficients(0.02, 1e-4, 0.0, 0.02, 0.0, 1e-4)


def profiled(**changes):
    made = snapshot(mappings=(MAPPING,), **changes)
    return replace(made, instances=tuple(replace(each, latency=PROFILE) for each in made.instances))


async def used(bed: TestBed) -> None:
    """Traffic from which each part learns: streams that are slower than the profile, texts, priorities. A fit counts
    ten intervals a second and is solved after 25."""
    bed.every(Script(tokens=60, prompt_tokens=100, first_delay_s=0.01, token_delay_s=0.03))
    text = {"prompt": "four" * 100, "max_tokens": 200, "stream": True}
    for _ in range(2):
        asked = [bed.ask(completion(**text, metadata={"workflow_id": f"w{index % 4}"})) for index in range(12)]
        asked += [bed.ask(completion(max_tokens=200, stream=True, priority=index % 2)) for index in range(6)]
        answers = await asyncio.gather(*asked)
        assert {answer.status for answer in answers} == {200}
    bed.gateway.thinking.observe("acme", "demo", 2.0)


def facts(bed: TestBed):
    """What the gateway would do with the next requests, and what it shows."""
    gateway = bed.gateway
    now = gateway.clock()
    lengths = gateway.answer_lengths
    windows = gateway.ledger.windows.view(now, {}, {})
    return {
        "answer": lengths.foretell(KIND, "w1", 100, None),
        "prompt": gateway.prompt_lengths.tokens(gateway.models["demo"], TEXT),
        "instances": gateway.scheduler.dispatcher.learned(),
        "samples": {id: each["fit"]["samples"] for id, each in gateway.scheduler.learned_state().items()},
        "windows": [tuple(row[part] for part in SHOWN) for row in windows],
        "thinking": gateway.thinking.expected_s("acme", "demo"),
        "mapped": [gateway.book.mapping("acme").assign(level, False, now) for level in (0, 1)],
    }


def begun(file: LearnedFile, wall=time.time, config=None) -> tuple[TestBed, LearnedState]:
    """A new process, as the service starts one, before it hears of any instance. In a loop."""
    bed = TestBed(config or profiled(), name="test")
    learned = LearnedState(file, bed.gateway, wall)
    learned.restore()
    bed.app._gateway = bed.gateway
    bed.gateway.configure(bed.config)
    learned.restore_configured()
    return bed, learned


async def restored(file: LearnedFile, wall=time.time, config=None) -> tuple[TestBed, LearnedState]:
    """One that has heard of its instances."""
    bed, learned = begun(file, wall, config)
    await bed.gateway.monitor.settle(1)
    await asyncio.sleep(0)
    return bed, learned


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """A file that a used gateway wrote, and what that gateway knew."""
    path = tmp_path_factory.mktemp("learned") / "test.learned.json"

    async def run():
        async with TestBed(profiled()) as bed:
            await used(bed)
            learned = LearnedState(LearnedFile(path), bed.gateway)
            await learned.save()
            learned.close()
            assert learned.age_s() < 5
            return facts(bed)

    return path, asyncio.run(run())


@pytest.fixture
def file(taken, tmp_path):
    """A copy that a test may damage."""
    path = tmp_path / "test.learned.json"
    path.write_bytes(taken[0].read_bytes())
    return LearnedFile(path)


def known(file: LearnedFile, wall=time.time, config=None):
    async def run():
        bed, learned = await restored(file, wall, config)
        found = facts(bed)
        learned.close()
        return found, learned.restored_age_s

    return asyncio.run(run())


def fresh(config=None):
    """Of a gateway that has never run before."""
    return known(LearnedFile(Path("/nonexistent/test.learned.json")), config=config)[0]


def test_the_next_process_knows_what_the_last_one_learned(taken, file):
    before = taken[1]
    found, age_s = known(file)
    assert found["answer"] == before["answer"]
    assert found["prompt"] == before["prompt"]
    assert found["instances"] == before["instances"]
    assert found["samples"] == before["samples"]
    assert min(samples for samples, *_ in before["samples"].values()) > 25
    assert found["mapped"] == before["mapped"]
    assert found["thinking"] == before["thinking"] > 0
    assert found["windows"] == before["windows"] != []
    assert 0 <= age_s < 30
    first = fresh()
    assert first["answer"] != before["answer"]
    assert first["mapped"] != before["mapped"]
    assert (first["instances"], first["windows"]) == ({"e1": PROFILE, "e2": PROFILE}, [])
    assert PROFILE not in before["instances"].values()


def killed_early(file: LearnedFile, wall=time.time, config=None) -> None:
    """A process that stores what it knows before it hears of any instance, as it does right after its start."""

    async def run():
        _, learned = begun(file, wall, config)
        await learned.save()
        learned.close()

    asyncio.run(run())


def test_a_process_that_is_killed_early_leaves_what_it_began_with(taken, file):
    killed_early(file)
    killed_early(file)
    found, _ = known(file)
    before = taken[1]
    assert (found["instances"], found["samples"]) == (before["instances"], before["samples"])
    assert (found["answer"], found["mapped"], found["windows"]) == (
        before["answer"],
        before["mapped"],
        before["windows"],
    )


def test_what_such_a_process_leaves_is_as_old_as_it_was(taken, file):
    """One that starts again and again would otherwise keep latencies of yesterday."""
    first = fresh()["instances"]
    killed_early(file, wall=lambda: time.time() + 0.6 * LATENCY_S)
    found, _ = known(file, wall=lambda: time.time() + 0.9 * LATENCY_S)
    assert found["instances"] == taken[1]["instances"] != first
    found, _ = known(file, wall=lambda: time.time() + 1.1 * LATENCY_S)
    assert found["instances"] == first
    killed_early(file, wall=lambda: time.time() + 1.1 * LATENCY_S)
    assert not json.loads(file.path.read_bytes().partition(b"\n")[2])["unseen"]


@pytest.mark.parametrize("wrong", [5, ["u", "m", {}], ["u", "m", {}, "old"], ["u", "m", {}, -1.0]])
def test_an_unseen_instance_that_cannot_be_read_costs_nothing(file, wrong, caplog):
    rewritten(file, lambda parts: parts.update(unseen={"e1": wrong}, instances={"e2": parts["instances"]["e2"]}))
    killed_early(file)
    assert list(json.loads(file.path.read_bytes().partition(b"\n")[2])["unseen"]) == ["e2"]
    known(file)


def damaged(path, change):
    head, _, body = path.read_bytes().partition(b"\n")
    said = json.loads(head)
    path.write_bytes(change(said, body))


DAMAGE = {
    "cut": lambda said, body: json.dumps(said).encode() + b"\n" + body[: len(body) // 2],
    "changed": lambda said, body: json.dumps(said).encode() + b"\n" + body.replace(b"acme", b"evil"),
    "of another version": lambda said, body: json.dumps({**said, "version": 99}).encode() + b"\n" + body,
    "from the future": lambda said, body: json.dumps({**said, "at": said["at"] + 7200}).encode() + b"\n" + body,
    "of no time": lambda said, body: json.dumps({**said, "at": "now"}).encode() + b"\n" + body,
    "empty": lambda said, body: b"",
    "a list": lambda said, body: b"[]\n[]",
    "binary": lambda said, body: os.urandom(200),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_file_that_cannot_be_trusted_is_not_used(file, how, caplog):
    damaged(file.path, DAMAGE[how])
    with caplog.at_level(logging.WARNING):
        found, age_s = known(file)
    assert "what was learned before is not used" in caplog.text
    assert age_s is None
    assert found == fresh()


def rewritten(file: LearnedFile, change):
    """Parts that are wrong although the file is whole, as a defect of another release might write them."""
    parts = dict(file.load(time.time()).parts)
    change(parts)
    file.save(parts, time.time())


WRONG = {
    "answers": lambda parts: parts["answers"].update(means=[["acme"]]),
    "prompts": lambda parts: parts.update(prompts={"ratios": {"demo": "four"}}),
    "thinking": lambda parts: parts.update(thinking=[["acme", "demo", -1.0, 0.0]]),
    "windows": lambda parts: parts["windows"][0][2].append([1.0]),
    "workflows": lambda parts: parts.update(workflows={"since": "today"}),
    "mappings": lambda parts: parts["mappings"][0][1].update(last_queue=[1.0, 2.0, 3.0]),
    "instances": lambda parts: parts["instances"]["e1"][2]["fit"].update(matrix=[[1.0]]),
}


@pytest.mark.parametrize("part", WRONG)
def test_a_part_that_cannot_be_read_costs_no_other_part(taken, file, part, caplog):
    rewritten(file, WRONG[part])
    with caplog.at_level(logging.WARNING):
        found, _ = known(file)
    assert "is not used" in caplog.text
    before, first = taken[1], fresh()
    names = {
        "answers": "answer",
        "prompts": "prompt",
        "thinking": "thinking",
        "mappings": "mapped",
        "windows": "windows",
    }
    for other, name in names.items():
        if other == part:
            assert found[name] == first[name]
        elif name != "windows":
            assert found[name] == before[name], other
    if part == "instances":
        assert found["instances"] == {"e1": PROFILE, "e2": before["instances"]["e2"]}


@pytest.mark.parametrize(
    ("later_s", "kept"),
    [(50, {"windows", "instances", "answer"}), (70, {"instances", "answer"}), (LATENCY_S + 60, {"answer"}),
     (LENGTHS_S + 60, set())],
)  # fmt: skip
def test_what_is_too_old_is_not_used(taken, file, later_s, kept, caplog):
    with caplog.at_level(logging.INFO):
        found, _ = known(file, wall=lambda: time.time() + later_s)
    assert ("is used again" in caplog.text) == bool(kept)
    assert ("is too old to be used" in caplog.text) == (not kept)
    first = fresh()
    assert bool(found["windows"]) == ("windows" in kept)
    assert (found["instances"] == taken[1]["instances"]) == ("instances" in kept)
    assert (found["answer"] == taken[1]["answer"]) == ("answer" in kept)
    assert (found["answer"] == first["answer"]) == ("answer" not in kept)


OF_WINDOWS, OF_INSTANCES = "attainment windows", "latencies of instances, frames of the ordering"


@pytest.mark.parametrize(
    ("age_s", "kept", "told"),
    [
        (30.0, {"windows", "instances", "answer"}, "is used again"),
        (60.0, {"instances", "answer"}, f"is used again, but for what is too old: {OF_WINDOWS}"),
        (LATENCY_S - 30, {"instances", "answer"}, f"is used again, but for what is too old: {OF_WINDOWS}"),
        (LATENCY_S, {"answer"}, f"is used again, but for what is too old: {OF_WINDOWS}, {OF_INSTANCES}"),
        (LENGTHS_S - 0.001, {"answer"}, f"is used again, but for what is too old: {OF_WINDOWS}, {OF_INSTANCES}"),
        (LENGTHS_S, set(), "is too old to be used"),
    ],
)
def test_the_log_says_what_of_a_state_is_used_at_its_age(taken, file, age_s, kept, told, caplog):
    """To the second of the wall clock."""
    at = json.loads(file.path.read_bytes().partition(b"\n")[0])["at"]
    with caplog.at_level(logging.INFO):
        found, known_age_s = known(file, wall=lambda: at + age_s)
    assert known_age_s == pytest.approx(age_s, abs=1e-6)
    (line,) = [each.getMessage() for each in caplog.records if "what was learned until" in each.getMessage()]
    assert line == f"what was learned until {age_s:.0f} s ago {told}"
    assert bool(found["windows"]) == ("windows" in kept)
    assert (found["instances"] == taken[1]["instances"]) == ("instances" in kept)
    assert (found["answer"] == taken[1]["answer"]) == ("answer" in kept)


def moved(config, **changes):
    first, *rest = config.instances
    return replace(config, instances=(replace(first, **changes), *rest))


@pytest.mark.parametrize(
    "changes", [{"url": "http://10.0.0.9:8000"}, {"latency": LatencyCoefficients(0.5, 1e-4, 0.0, 0.5, 0.0, 1e-4)}]
)
def test_nothing_is_believed_of_an_instance_that_is_another_one_now(taken, file, changes):
    config = moved(profiled(), **changes)
    found, _ = known(file, config=config)
    assert found["instances"]["e1"] == config.instances[0].latency
    assert found["instances"]["e2"] == taken[1]["instances"]["e2"]


def test_a_mapping_that_was_changed_begins_anew(file):
    config = replace(profiled(), mappings=(MappingConfig(None, MAPPING.levels, window=5),))
    found, _ = known(file, config=config)
    assert found["mapped"] == fresh(config)["mapped"]


def test_the_level_of_a_bound_is_that_of_its_version(tmp_path):
    """Taken over with the forest, which comes from the database some time later."""
    file = LearnedFile(tmp_path / "test.learned.json")

    async def run():
        async with TestBed(profiled()) as bed:
            lengths = bed.gateway.answer_lengths
            lengths.take({"demo": LengthsInForce(7, forest())})
            for _ in range(30):
                await bed.ask(completion(prompt=[1] * 200, max_tokens=300))
            level, hits = lengths.level("demo"), lengths.hits("demo")
            assert (level, hits.answers) != (0.9, 0)
            await LearnedState(file, bed.gateway).save()
        for version, found in ((7, (level, hits)), (8, None)):
            bed, _ = await restored(file)
            lengths = bed.gateway.answer_lengths
            lengths.take({"demo": LengthsInForce(version, forest())})
            assert ((lengths.level("demo"), lengths.hits("demo")) == (level, hits)) == (found is not None)

    asyncio.run(run())


def by_calm(**options):
    return profiled(ordering="calm", ordering_options=options)


def frames_of(bed: TestBed):
    return bed.gateway.scheduler.dispatcher.lanes["demo"].queue.frames


@pytest.fixture
def adapted(tmp_path):
    """A file of a gateway whose ordering has adapted its cutoff, and that frame and cutoff."""
    file = LearnedFile(tmp_path / "test.learned.json")
    frames = CalmOrdering().frames()
    for second in range(60):
        frames.join(Request(f"r{second}", float(second), Targets(1e6, 1e6), 100, 10, "demo"))
        frames.weigh([Replica("e1", 0.02, 0.02, 0.0, 0.0, 0, 1)], float(second))

    async def run():
        async with TestBed(by_calm()) as bed:
            bed.gateway.runtime.push(ev.FramesLearned("demo", "calm", frames.state(60.0), 0.0))
            assert (await bed.ask(completion())).status == 200
            await LearnedState(file, bed.gateway).save()
            return frames_of(bed).frame, frames_of(bed).cutoff

    return file, asyncio.run(run())


def gone_on(file, config=None, wall=time.time):
    """Frame and cutoff of the next process, after a request; None where its ordering has no frames."""

    async def run():
        bed, learned = await restored(file, wall, config or by_calm())
        learned.close()
        frames = frames_of(bed)
        found = None if frames is None else (frames.frame, frames.cutoff)
        assert (await bed.ask(completion())).status == 200
        return found

    return asyncio.run(run())


def test_the_next_process_orders_with_the_cutoff_that_the_last_one_had_found(adapted, caplog):
    file, before = adapted
    assert before[1] == CUTOFFS[1]
    assert gone_on(file) == before
    assert gone_on(file, wall=lambda: time.time() + FRAMES_S - 60) == before
    assert "is not used" not in caplog.text


UNUSED = {
    "of another version": lambda frames: frames.update(version=FRAMES_VERSION + 1),
    "without its frame": lambda frames: frames["models"]["demo"].pop("frame"),
    "with a cutoff that is none": lambda frames: frames["models"]["demo"]["cutoff"].update(epoch=[9, 9, 9]),
    "of no ordering": lambda frames: frames.update(ordering=None),
    "of one without frames": lambda frames: frames.update(ordering="earliest_deadline_first"),
}


@pytest.mark.parametrize("how", UNUSED)
def test_frames_that_cannot_be_read_cost_no_other_part(adapted, how, caplog):
    file, _ = adapted
    rewritten(file, lambda parts: UNUSED[how](parts["frames"]))
    assert gone_on(file) == (0, CUTOFFS[0])
    assert caplog.text.count("is not used") == 1
    assert "the part frames" in caplog.text


def test_a_file_of_a_release_that_kept_no_frames_is_used(adapted, caplog):
    file, _ = adapted
    rewritten(file, lambda parts: parts.pop("frames"))
    assert gone_on(file) == (0, CUTOFFS[0])
    assert "is not used" not in caplog.text
    assert known(file, config=by_calm())[1] is not None


@pytest.mark.parametrize(
    ("config", "later_s", "found"),
    [
        (by_calm(frame_steps=20), 0.0, (0, CUTOFFS[0])),
        (profiled(), 0.0, None),
        (by_calm(), FRAMES_S + 60, (0, CUTOFFS[0])),
    ],
    ids=["other settings", "another ordering", "too old"],
)
def test_frames_of_another_time_or_order_are_not_used(adapted, config, later_s, found):
    assert gone_on(adapted[0], config, lambda: time.time() + later_s) == found


def test_what_is_copied_on_the_loop_is_bounded(taken, tmp_path):
    file = LearnedFile(tmp_path / "test.learned.json")

    async def run():
        async with TestBed(profiled()) as bed:
            answer = await bed.ask(completion(max_tokens=2))
            assert answer.status == 200
            (record,) = bed.sink.records
            windows, now = bed.gateway.ledger.windows, bed.gateway.clock()
            for tenant in range(100):
                for _ in range(100):
                    windows.observe(replace(record, tenant=f"t{tenant}"), "", now)
            mapped = tuple(MappingConfig(f"t{tenant}", MAPPING.levels) for tenant in range(100))
            bed.gateway.configure(replace(bed.config, mappings=mapped))
            for tenant in range(100):
                for number in range(100):
                    bed.gateway.book.observe(f"t{tenant}", 0, float(number), 0.1, 0.0, now)
            await LearnedState(file, bed.gateway).save()
        parts = file.load(time.time()).parts
        measured = [mapping["ttft"] for _, mapping in parts["mappings"]]
        assert len(measured) == 100
        assert sum(map(len, measured)) <= MOST_MEASURED / 2
        assert {rows[-1][2] for rows in measured} == {99.0}, "the newest are kept"
        stored = parts["windows"]
        assert len(stored) == 101
        assert sum(len(entries) for *_, entries in stored) <= MOST_REQUESTS

    asyncio.run(run())


def test_a_disk_that_is_full_keeps_nobody_waiting_and_is_told_once(tmp_path, caplog):
    async def run():
        async with TestBed(profiled()) as bed:
            folder = tmp_path / "no folder"
            folder.write_text("a file")
            learned = LearnedState(LearnedFile(folder / "test.learned.json"), bed.gateway)
            with caplog.at_level(logging.WARNING):
                for _ in range(3):
                    await learned.save()
            assert caplog.text.count("cannot be written") == 1
            assert learned.age_s() is None
            assert (await bed.ask(completion())).status == 200
            folder.unlink()
            await learned.save()
            assert learned.age_s() < 5
            assert (folder / "test.learned.json").stat().st_mode & 0o777 == 0o600

    asyncio.run(run())


INTERRUPTED_S = 0.05  # another process has the processor


async def test_a_busy_machine_does_not_make_a_gateway_store_more_rarely(tmp_path, monkeypatch):
    """Copying is bounded as a share of the loop's work. What it waits for other processes is none."""
    monkeypatch.setattr("api.openai.learned_state.PERIOD_S", 0.01)
    file = LearnedFile(tmp_path / "test.learned.json")
    async with TestBed(profiled()) as bed:
        learned = LearnedState(file, bed.gateway)
        copied, parts = [], learned._parts

        def interrupted():
            copied.append(bed.gateway.clock())
            time.sleep(INTERRUPTED_S)
            return parts()

        monkeypatch.setattr(learned, "_parts", interrupted)
        running = asyncio.create_task(learned.run())
        await until_on_loop(lambda: len(copied) >= 3, 8.0)
        assert max(later - one for one, later in pairwise(copied)) < 200 * INTERRUPTED_S
        running.cancel()
        learned.close()
