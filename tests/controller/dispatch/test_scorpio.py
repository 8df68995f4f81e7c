"""SCORPIO's guards and ALADDIN's placement as parts of the dispatcher, in numbers (SPEED: 10 ms + 0.1 ms a token)."""

import math

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.types import InstanceSpec
from controller.dispatch import build_dispatcher
from controller.dispatch.pacing import RecentDemand
from controller.dispatch.shadow_state import ShadowInstance
from controller.dispatch.virtual_batch import VirtualBatch
from controller.dispatch.worst_case_fit import WorstCaseFit
from controller.policies.admission.scorpio_ttft_guard import Config, ScorpioTtftGuard
from controller.policies.routing.best_fit import BestFit
from controller.policies.routing.best_fit import Config as FitConfig
from tests.controller.dispatch.fleet import SPEED, kinds, request, sends, up


def prefill_s(tokens):
    return SPEED.prefill_a + SPEED.prefill_b * tokens


def screened(waiting, engines=1, backlog=0.0, now=0.0, **config):
    return ScorpioTtftGuard(Config(**config)).screen(waiting, prefill_s, backlog, engines, now)


def test_each_is_predicted_behind_the_tokens_before_it():
    # 1,000 tokens end at 0.11, with the margin 0.16; both together at 0.21, with it 0.26.
    waiting = [request("a", ttft=0.2, prompt=1000), request("b", ttft=0.25, prompt=1000)]
    assert screened(waiting) == ["b"]
    assert screened(waiting, margin_s=0.0) == []
    assert screened(waiting, engines=2) == []
    assert screened(waiting, backlog=0.05) == ["a"]


def test_what_is_refused_delays_no_other():
    waiting = [request("huge", ttft=0.3, prompt=5000), request("b", ttft=0.3, prompt=1000)]
    assert screened(waiting) == ["huge"]


def test_an_empty_queue_has_nothing_to_screen():
    assert screened([]) == []


def test_in_the_dispatcher_the_unattainable_is_refused_and_the_rest_goes_in_deadline_order():
    dispatcher = build_dispatcher("scorpio")
    dispatcher.handle([up()], 0.0)
    late, loose, tight = request("late", ttft=0.05), request("loose", ttft=5.0), request("tight", ttft=1.0)
    reply = dispatcher.handle([ev.Arrived(late), ev.Arrived(loose), ev.Arrived(tight)], 0.0)
    assert kinds(reply, ev.Refuse) == ["late"]
    assert [name for name, _ in sends(reply)] == ["tight", "loose"]
    (refusal,) = [action for action in reply.actions if isinstance(action, ev.Refuse)]
    assert refusal.decision.reason == "unattainable_in_queue"


@pytest.mark.parametrize("order", [("slow", "fast"), ("fast", "slow")])
def test_instances_of_unlike_speed_are_judged_together_whichever_came_first(order):
    """1,000 tokens take 0.11 and 0.33 s, as on two instances of 0.165 s; with the margin they end at 0.215."""
    dispatcher = build_dispatcher("scorpio")
    slow = SPEED._replace(prefill_a=3 * SPEED.prefill_a, prefill_b=3 * SPEED.prefill_b)
    speeds = {"fast": SPEED, "slow": slow}
    specs = [InstanceSpec(name, "m", latency=speeds[name], max_num_seqs=32) for name in order]
    dispatcher.handle([ev.InstanceUp(spec) for spec in specs], 0.0)
    arrived = [ev.Arrived(request(f"r{ttft}", ttft=ttft, prompt=1000)) for ttft in (0.2, 0.23)]
    assert kinds(dispatcher.handle(arrived, 0.0), ev.Refuse) == ["r0.2"]


def test_put_off_instead_of_refused_it_is_served_when_no_one_else_waits():
    dispatcher = build_dispatcher("scorpio", {"admission": {"refuse": False}})
    dispatcher.handle([up()], 0.0)
    reply = dispatcher.handle([ev.Arrived(request("late", ttft=0.05)), ev.Arrived(request("fine", ttft=1.0))], 0.0)
    assert kinds(reply, ev.Refuse) == []
    assert sends(reply) == [("fine", "w")]
    reply = dispatcher.handle([ev.FirstToken("fine")], 0.1)
    assert sends(reply) == [("late", "w")]


def instance(*sent, decoding=True, slots=32):
    made = ShadowInstance(InstanceSpec("w", "m", latency=SPEED, max_num_seqs=slots))
    for index, each in enumerate(sent):
        made.send(each, 0.0, 0, index)
        if decoding:
            made.first_token(each.id, 0.0)
    return made


def test_the_virtual_batch_counts_each_by_its_share_of_the_steps():
    """50/50 + 50/50 + 50/100 + 50/200 of SCORPIO's own test, and the newcomer: 3.75 sequences."""
    tpots = (0.05, 0.05, 0.1, 0.2)
    busy = instance(*(request(f"r{i}", tpot=tpot) for i, tpot in enumerate(tpots)))
    step = VirtualBatch().step_s(busy, 0.05)
    assert step == pytest.approx(SPEED.decode_a + SPEED.decode_c * 3.75)
    assert VirtualBatch().room(busy, RecentDemand(1.0), 0.05, 0.0).slots == 1
    # 0.02375 x 2.2 = 0.05225: above the tightest TPOT.
    assert VirtualBatch(VirtualBatch.Config(inefficiency=2.2)).room(busy, RecentDemand(1.0), 0.05, 0.0).slots == 0


def test_one_steps_prompt_tokens_wait_at_an_engine_and_no_more():
    pacing = VirtualBatch(VirtualBatch.Config(batch_tokens=300))
    assert pacing.ready(instance(request("a", prompt=299), decoding=False), 0.0)
    assert not pacing.ready(instance(request("a", prompt=300), decoding=False), 0.0)
    assert pacing.room(instance(request("a", prompt=200), decoding=False), RecentDemand(1.0), 0.5, 0.0).tokens == 101


def test_aladdin_takes_the_fullest_that_can_and_the_emptiest_when_told():
    full, empty = instance(request("a"), request("b")), instance()
    full.id, empty.id = "full", "empty"
    assert BestFit().choose([full, empty], 0.0) is full
    assert BestFit(FitConfig(fit="worst")).choose([full, empty], 0.0) is empty
    assert BestFit().choose([], 0.0) is None


def test_aladdins_prefill_must_fit_what_the_decodes_have_in_hand():
    # A decode at TPOT 0.5 whose first token came at 0 has until 0.5 for its next: at 0.2, 0.3 s are in hand.
    room = WorstCaseFit().room(instance(request("a", tpot=0.5)), RecentDemand(0.7), 0.5, 0.2)
    assert room.tokens == pytest.approx((0.3 - SPEED.prefill_a) / SPEED.prefill_b)
    assert WorstCaseFit().room(instance(request("a", tpot=0.5)), RecentDemand(0.1), 0.5, 0.2).tokens == pytest.approx(
        900
    )
    assert WorstCaseFit().room(instance(request("a", tpot=0.5)), RecentDemand(0.7), 0.5, 0.6).tokens == 0.0


def test_aladdins_step_at_full_length_must_keep_the_tpot():
    busy = instance(*(request(f"r{i}") for i in range(10)))  # a step of 11 takes 31 ms
    assert WorstCaseFit().room(busy, RecentDemand(0.7), 0.0311, 0.0).slots == 1
    assert WorstCaseFit().room(busy, RecentDemand(0.7), 0.0309, 0.0).slots == 0
    assert WorstCaseFit(WorstCaseFit.Config(tpot_share=0.5)).room(busy, RecentDemand(0.7), 0.0311, 0.0).slots == 0


def test_aladdin_packs_before_it_spreads():
    dispatcher = build_dispatcher("aladdin")
    dispatcher.handle([up("w1"), up("w2")], 0.0)
    reply = dispatcher.handle([ev.Arrived(request(f"r{i}", prompt=100)) for i in range(4)], 0.0)
    assert len({instance for _, instance in sends(reply)}) == 1
    assert len(sends(reply)) == 4


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: VirtualBatch.Config(inefficiency=0), "inefficiency"),
        (lambda: VirtualBatch.Config(batch_tokens=0), "batch_tokens"),
        (lambda: WorstCaseFit.Config(ttft_share=0), "ttft_share"),
        (lambda: Config(margin_s=math.inf), "margin_s"),
        (lambda: build_dispatcher("aladdin", {"routing": {"fit": "tight"}}), "fit"),
    ],
)
def test_bad_settings_are_named(build, field):
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field == field
