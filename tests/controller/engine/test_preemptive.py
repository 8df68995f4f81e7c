"""FlowPrefill's scheduler against the worked examples F1, F3 and F4, and what a driver relies on."""

import pytest

from controller.core.errors import ConfigError
from controller.core.steps import Aborted, Added, Paused, Resumed, SeqState, StepsDone, Suspended
from controller.engine import PreemptionConfig, ProtocolError
from controller.engine.seats import RankedQueue
from controller.policies.ordering.prefill_orders import PREFILL_ORDERS
from controller.predict.boundaries import LayerProfile
from tests.controller.engine.virtual_device import Device, build, prompt


def test_f4_two_requests_four_rounds():
    device = Device(build()).add(prompt("A", 0.0, 10_000, 20.0), prompt("B", 1.0, 500, 2.0)).run()
    assert device.log == [
        (0.0, "start", "A"),
        (1.0, "suspend", "A"),
        (1.0, "start", "B"),
        (1.5, "resume", "A"),
    ]
    assert device.ends == pytest.approx({"B": 1.5, "A": 10.5})
    rounds = device.engine.rounds
    assert (rounds.rounds, rounds.submits, rounds.preempts, rounds.resumes) == (4, 2, 1, 1)


def test_a_round_whose_first_already_runs_commands_nothing():
    device = Device(build(batch=False)).add(prompt("A", 0.0, 1000, 2.0), prompt("B", 0.5, 100, 30.0)).run()
    assert [what for _, what, _ in device.log] == ["start", "start"]
    assert device.engine.rounds.rounds == 4


def test_f3_a_request_half_done_is_not_preempted():
    device = Device(build()).add(prompt("A", 0.0, 10_000, 11.0), prompt("C", 9.0, 1500, 30.0)).run()
    assert device.ends == pytest.approx({"A": 10.0, "C": 11.5})
    assert device.engine.rounds.signals == 0


def test_what_is_hopeless_makes_way_for_what_is_not():
    late, fresh = prompt("late", 0.0, 10_000, 5.0), prompt("fresh", 1.0, 500, 30.0)
    device = Device(build()).add(late, fresh).run()
    assert device.ends == pytest.approx({"fresh": 1.5, "late": 10.5})


@pytest.mark.parametrize(
    ("ordering", "now", "expected"),
    [
        ("s_edf", 0.0, "E A C D B"),
        ("s_edf", 5.0, "A C D B E"),
        ("d_edf", 5.0, "D A C B E"),
        ("edf", 0.0, "E B D A C"),
        ("edf", 5.0, "E B D A C"),
        ("fcfs", 5.0, "A B C D E"),
    ],
)
def test_f1_orders(ordering, now, expected):
    queue = RankedQueue(PREFILL_ORDERS[ordering])
    work = {"A": (10, 3), "B": (4, 5), "C": (20, 1), "D": (8, 9), "E": (2, 2)}
    for name, (deadline, needed) in work.items():
        queue.add(prompt(name, 0.0, 1, deadline), needed, 0.0)
    queue.advance(now)
    assert " ".join(seq.id for seq in queue) == expected
    assert queue.first[1].id == expected[0]


def test_members_of_a_batch_are_preempted_and_resumed_as_one():
    long = [prompt("a", 0.0, 1000, 30.0), prompt("b", 0.0, 2000, 31.0)]
    engine = build()
    device = Device(engine)
    device.at(0.0, *(Added(seq) for seq in long))
    device.add(prompt("urgent", 1.0, 200, 1.5)).run()
    assert device.log == [
        (0.0, "start", "a b"),
        (1.0, "suspend", "a b"),
        (1.0, "start", "urgent"),
        (pytest.approx(1.2), "resume", "a b"),
    ]
    assert device.ends == pytest.approx({"urgent": 1.2, "a": 3.2, "b": 3.2})
    assert engine.rounds.batched == 1


def test_the_signal_is_answered_at_the_next_boundary():
    ten_layers = LayerProfile(10, (2.0, 8.0, 1.0, 4.0, 3.0))
    ends = {}
    for kind in ("operator", "layer"):
        engine = build(preemption=PreemptionConfig(boundary=kind))
        device = Device(engine, lambda step, seconds, used, kind=kind: ten_layers.next_boundary(kind, seconds, used))
        device.add(prompt("long", 0.0, 1800, 60.0), prompt("short", 0.185, 10, 0.5)).run()
        ends[kind] = device.ends["short"]
        assert device.ends["long"] == pytest.approx(1.81)
    assert ends == pytest.approx({"operator": 0.21, "layer": 0.37})  # 5 ms into the second layer: after its qkv


def test_a_step_that_ends_before_the_boundary_answers_with_its_end():
    engine = build()
    device = Device(engine, lambda step, seconds, used: seconds)
    device.add(prompt("A", 0.0, 1000, 20.0), prompt("B", 0.9, 100, 1.5)).run()
    assert device.ends == pytest.approx({"A": 1.0, "B": 1.1})
    assert engine.rounds.preempts == 0
    assert engine.rounds.blocking_max_s == pytest.approx(0.1)


def test_chunks_are_boundaries_without_a_suspend():
    engine = build(preemption=PreemptionConfig(boundary="chunk", chunk_tokens=400))
    device = Device(engine).add(prompt("A", 0.0, 1000, 20.0), prompt("B", 0.1, 100, 0.6)).run()
    assert device.log == [
        (0.0, "start", "A"),
        (pytest.approx(0.4), "start", "B"),
        (pytest.approx(0.5), "start", "A"),
        (pytest.approx(0.9), "start", "A"),
    ]
    assert device.ends == pytest.approx({"B": 0.5, "A": 1.1})
    assert engine.rounds.blocking_s / engine.rounds.signals == pytest.approx(0.3)


def test_boundary_none_runs_to_the_end():
    engine = build(preemption=PreemptionConfig(boundary="none"))
    device = Device(engine).add(prompt("A", 0.0, 1000, 20.0), prompt("B", 0.1, 100, 0.6)).run()
    assert device.ends == pytest.approx({"A": 1.0, "B": 1.1})
    assert engine.rounds.signals == 0


def test_news_while_a_signal_is_out_may_change_what_follows():
    device = Device(build(batch=False), lambda step, seconds, used: used + 0.2)
    device.add(
        prompt("A", 0.0, 5000, 60.0),
        prompt("B", 1.0, 1000, 5.0),
        prompt("C", 1.1, 100, 1.9),
        prompt("D", 1.15, 9, 50.0),
    )
    device.run()
    assert [(what, who) for _, what, who in device.log] == [
        ("start", "A"),
        ("suspend", "A"),
        ("start", "C"),
        ("start", "B"),
        ("start", "D"),
        ("resume", "A"),
    ]


def test_an_aborted_task_is_discarded_and_its_blocks_come_back():
    engine = build()
    doomed = prompt("A", 0.0, 5000, 60.0)
    device = Device(engine).add(doomed, prompt("B", 1.0, 1000, 3.0))
    device.at(1.5, Aborted(doomed))
    device.run()
    assert (1.5, "discard", "A") not in device.log  # the device is busy with B: the step is dropped when it is free
    assert [what for _, what, _ in device.log][-1] == "discard"
    assert engine.idle
    assert engine.blocks.usage == 0


def test_an_aborted_running_task_frees_the_device_at_a_boundary():
    engine = build()
    doomed = prompt("A", 0.0, 5000, 60.0)
    device = Device(engine, lambda step, seconds, used: used + 0.25).add(doomed, prompt("B", 0.5, 100, 80.0))
    device.at(1.0, Aborted(doomed))
    device.run()
    assert device.ends == pytest.approx({"A": 1.0, "B": 1.35})
    assert engine.idle


def test_the_room_of_an_aborted_running_task_goes_to_who_waited_for_it():
    engine = build(kv_blocks=64, max_model_len=1024)
    doomed = prompt("A", 0.0, 900, 60.0)
    device = Device(engine, lambda step, seconds, used: used + 0.05).add(doomed, prompt("B", 0.1, 800, 80.0))
    device.at(0.2, Aborted(doomed))
    device.run()
    assert device.ends == pytest.approx({"A": 0.2, "B": 1.05})
    assert engine.idle


def test_the_others_of_a_batch_go_on_when_one_hangs_up():
    engine = build()
    gone, stays = prompt("gone", 0.0, 1000, 30.0), prompt("stays", 0.0, 1000, 31.0)
    device = Device(engine)
    device.at(0.0, Added(gone), Added(stays))
    device.at(0.5, Aborted(gone))
    device.run()
    assert device.ends == pytest.approx({"gone": 0.5, "stays": 2.0})
    assert engine.blocks.usage == 0


def test_a_prompt_without_room_waits_for_suspended_work():
    engine = build(kv_blocks=64, max_model_len=1024)
    device = Device(engine).add(prompt("big", 0.0, 900, 60.0), prompt("urgent", 0.1, 200, 0.5)).run()
    assert device.ends == pytest.approx({"big": 0.9, "urgent": 1.1})
    small = Device(build(kv_blocks=64, max_model_len=1024)).add(
        prompt("big", 0.0, 900, 60.0), prompt("urgent", 0.1, 100, 0.5)
    )
    assert small.run().ends == pytest.approx({"urgent": 0.2, "big": 1.0})


def test_a_pause_keeps_suspended_steps_unless_kv_is_released():
    for release, expected in ((False, 5.1), (True, 6.1)):
        device = Device(build()).add(prompt("A", 0.0, 3000, 60.0), prompt("B", 1.0, 100, 2.0))
        device.at(1.05, Paused(release))
        device.at(3.1, Resumed())
        device.run()
        assert device.ends["A"] == pytest.approx(expected)


def test_decodes_get_the_device_at_the_last_moment():
    engine = build(preemption=PreemptionConfig(decode_a=0.01, decode_margin_s=0.0))
    chat = prompt("chat", 0.0, 100, 0.5, output=4, tpot_s=0.2)
    device = Device(engine).add(chat, prompt("long", 0.0, 2000, 60.0)).run()
    assert device.tokens_at["chat"] == pytest.approx([0.3, 0.5, 0.7])
    assert device.ends == pytest.approx({"chat": 0.7, "long": 2.13})


def test_decodes_do_not_wait_while_no_prompt_is_there():
    device = Device(build()).add(prompt("chat", 0.0, 100, 0.5, output=4, tpot_s=0.2)).run()
    assert device.tokens_at["chat"] == pytest.approx([0.11, 0.12, 0.13])


def test_broken_protocols_are_found():
    engine = build()
    device = Device(engine)
    device.tell(Added(prompt("A", 0.0, 100, 9.0)))
    with pytest.raises(ProtocolError):
        engine.handle([Suspended(1, 0.01)], 0.01)
    with pytest.raises(ProtocolError):
        build().handle([StepsDone(7, 1, 0.1)], 0.1)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"boundary": "kernel"}, "boundary"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"boundary": "chunk"}, "chunk_tokens"),
        ({"decode_a": -1.0}, "decode_a"),
    ],
)
def test_bad_settings_are_refused(settings, field):
    with pytest.raises(ConfigError) as caught:
        PreemptionConfig(**settings)
    assert caught.value.field == field


def test_states_are_those_of_the_continuous_engine():
    engine = build()
    seq = prompt("A", 0.0, 100, 9.0)
    device = Device(engine)
    device.tell(Added(seq))
    assert (seq.state, engine.waiting_count, list(engine.running)) == (SeqState.RUNNING, 0, [seq])
    device.run()
    assert (seq.state, seq.output_tokens, seq.first_token_at) == (SeqState.FINISHED, 1, pytest.approx(0.1))
