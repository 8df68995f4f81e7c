"""Prefill and decode on instances of their own: what must hold whatever is placed, moved, broken or cut."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.core.errors import ConfigError
from controller.core.types import Outcome, Targets
from controller.dispatch import MIGRATIONS, POLICY_SETS, build_dispatcher, build_migrator
from controller.policies.batching import BATCHINGS
from controller.simulator import Demand, Failure, LinkFailure, LinkSettings, Simulation, SimulationSettings
from controller.simulator.fleet.disaggregation import SimulatedTransfers
from controller.simulator.network import PortSpeed
from tests.controller.simulator.runs import PATIENT, SMALL, facts, simulate, some_demands

PREFILL, DECODE = replace(SMALL, role="prefill"), replace(SMALL, role="decode")
TWO_AND_TWO = (PREFILL, PREFILL, DECODE, DECODE)
FREE = LinkSettings(bandwidth_gb_s=1e9, latency_s=0.0)


def run(demands, instances=TWO_AND_TWO, policy="slackline", migration=None, hold_s=60.0, **more):
    chosen = {"migration": {"name": migration}} if migration else {}
    migrator = build_migrator(policy, {**chosen, "migrator": {"hold_s": hold_s}})
    chosen = SimulationSettings(tuple(instances), **more)
    return Simulation(chosen, build_dispatcher(policy), demands, migrator=migrator, keep_token_times=True).run()


def one(prompt=100, output=10, at=0.0, **more):
    return Demand("x", at, prompt, output, more.pop("targets", PATIENT), max_tokens=output, **more)


def test_a_lone_request_takes_prefill_then_transfer_then_decodes():
    """100 tokens x 1 MB over 1 GB/s: 0.1 s, and 0.01 s latency; then the decode instance sends the first token."""
    prefill, decode = (replace(each, kv_bytes_per_token=1_000_000) for each in (PREFILL, DECODE))
    links = LinkSettings(bandwidth_gb_s=1.0, latency_s=0.01)
    (record,) = run([one()], (prefill, decode), links=links).records
    first = 0.004 + 5e-5 * 100 + 1e-9 * 100**2
    assert record.ttft_s == pytest.approx(first + 0.11)
    assert record.kv_transfer_s == pytest.approx(0.11)
    assert (record.prefill_instance, record.instance) == ("engine-0", "engine-1")
    steps = [0.006 + 1e-7 * (100 + n) + 1e-4 for n in range(1, 10)]
    assert record.e2e_s == pytest.approx(first + 0.11 + sum(steps))
    assert record.tpot_s == pytest.approx(sum(steps) / 9)
    assert record.output_tokens == len(record.token_times) == 10


def test_three_transfers_over_two_ports_end_when_their_bytes_have_moved():
    """300 MB each. x leaves engine-0, whose port has 0.2 GB/s, and y engine-1; the decode instance's port has 1 GB/s,
    so y has 0.8 of it. 0.1 s later z leaves engine-0 too: 0.1 each for x and z. y ends after 0.08 / 0.8 + 0.22 / 0.8
    s. x has 0.28 left then z comes, z 0.02 when x has ended, for which it has all of the port."""
    whole = replace(PREFILL, max_num_batched_tokens=1024)
    instances = tuple(replace(each, kv_bytes_per_token=1_000_000) for each in (whole, whole, DECODE))
    demands = [Demand(name, at, 300, 5, PATIENT, max_tokens=5) for name, at in (("x", 0.0), ("y", 0.0), ("z", 0.1))]
    links = LinkSettings(bandwidth_gb_s=1.0, latency_s=0.0, ports=(PortSpeed(0, 0.2),))
    records = {record.id: record for record in run(demands, instances, "round_robin", links=links).records}
    assert [records[name].prefill_instance for name in "xyz"] == ["engine-0", "engine-1", "engine-0"]
    assert records["y"].kv_transfer_s == pytest.approx(0.1 + 0.22 / 0.8)
    assert records["x"].kv_transfer_s == pytest.approx(0.1 + 0.28 / 0.1)
    assert records["z"].kv_transfer_s == pytest.approx(0.28 / 0.1 + 0.02 / 0.2)


def test_an_answer_of_one_token_never_moves():
    result = run([one(output=1)])
    assert result.records[0].prefill_instance == ""
    assert result.records[0].kv_transfer_s is None
    assert result.moved_bytes == 0


@pytest.mark.parametrize("migration", list(MIGRATIONS))
@pytest.mark.parametrize("policy", ["round_robin", "slackline"])
def test_nothing_is_lost_doubled_or_invented(migration, policy):
    demands = some_demands(150, rate=40.0)
    result = run(demands, policy=policy, migration=migration)
    assert sorted(r.id for r in result.records) == sorted(d.id for d in demands)
    wanted = {d.id: d for d in demands}
    for record in result.records:
        assert record.outcome is Outcome.OK
        assert record.output_tokens == wanted[record.id].output_tokens
        assert list(record.token_times) == sorted(record.token_times)
        if wanted[record.id].output_tokens > 1:
            assert record.prefill_instance in ("engine-0", "engine-1")
            assert record.instance in ("engine-2", "engine-3")
    uses = {use.id: use for use in result.instances}
    assert sum(use.generated_tokens for use in uses.values()) == sum(d.output_tokens for d in demands)
    assert sum(uses[f"engine-{i}"].generated_tokens for i in (0, 1)) == len(demands)
    assert sum(uses[f"engine-{i}"].prompt_tokens for i in (0, 1)) == sum(d.prompt_tokens for d in demands)
    moved = sum(d.prompt_tokens for d in demands if d.output_tokens > 1) * SMALL.kv_bytes_per_token
    assert result.moved_bytes == pytest.approx(moved)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("batching", list(BATCHINGS))
def test_leaps_change_nothing(batching):
    instances = (replace(PREFILL, batching=batching), *(replace(DECODE, batching=batching),) * 2)
    demands = some_demands(80, rate=30.0)
    leaping, single = (run(demands, instances, leaps=leaps) for leaps in (True, False))
    assert facts(leaping) == facts(single)
    assert leaping.events < single.events or not getattr(BATCHINGS[batching], "steady", False)


@pytest.mark.parametrize("kv_tokens", [1024, 1536])
def test_leaps_change_nothing_when_blocks_run_out(kv_tokens):
    instances = (replace(PREFILL, kv_tokens=kv_tokens), replace(DECODE, kv_tokens=kv_tokens))
    demands = some_demands(60, rate=30.0, longest=300)
    leaping, single = (
        run(demands, instances, "round_robin", "least_outstanding", leaps=leaps) for leaps in (True, False)
    )
    assert facts(leaping) == facts(single)
    assert sum(record.preemptions for record in leaping.records) > 0
    assert all(record.outcome is Outcome.OK for record in leaping.records)


def test_the_same_run_twice_is_the_same():
    demands = some_demands(100, rate=40.0)
    assert facts(run(demands)) == facts(run(demands))


def test_separate_stages_keep_prefills_out_of_decodes():
    """The reason for it all: a long prompt beside decodes stretches their steps; apart it does not."""
    steady = [Demand(f"d{i}", 0.0, 20, 200, PATIENT, max_tokens=200) for i in range(4)]
    long_ones = [Demand(f"p{i}", 0.3 + 0.05 * i, 900, 1, PATIENT, max_tokens=1) for i in range(10)]
    together = simulate([*steady, *long_ones], "round_robin", (SMALL, SMALL))
    apart = run([*steady, *long_ones], (PREFILL, DECODE), "round_robin", links=FREE)

    def worst_gap(result):
        times = [r.token_times for r in result.records if r.id[0] == "d"]
        return max(b - a for each in times for a, b in pairwise(each) if a > 0.3)

    assert worst_gap(apart) < 0.5 * worst_gap(together)


def test_kept_kv_holds_prefills_back_until_it_is_taken_over():
    """KV for one prompt at the prefill instance, a slow link: the second prefill starts when the first has moved."""
    prefill = replace(PREFILL, kv_tokens=1024, kv_bytes_per_token=1_000_000)
    links = LinkSettings(bandwidth_gb_s=1.0, latency_s=0.0)
    demands = [Demand(f"r{i}", 0.0, 700, 3, PATIENT, max_tokens=3) for i in range(2)]
    first, second = sorted(run(demands, (prefill, DECODE), "round_robin", links=links).records, key=lambda r: r.ttft_s)
    assert second.ttft_s >= first.ttft_s + 0.7


FIRST = 0.004 + 5e-5 * 100 + 1e-9 * 100**2  # seconds of the prefill of `one`


@pytest.mark.parametrize("migration", list(MIGRATIONS))
@pytest.mark.parametrize(
    ("gb_s", "kv_transfer_s"),
    [(20.0, 0.1 / 20 / 10), (1.0, 0.1 - FIRST)],  # one layer of ten is left; or the link is slower than the prefill
)
def test_overlap_hides_the_way_behind_the_prefill(migration, gb_s, kv_transfer_s):
    instances = tuple(replace(each, kv_bytes_per_token=1_000_000) for each in (PREFILL, DECODE))
    links = LinkSettings(bandwidth_gb_s=gb_s, latency_s=0.0, overlap=True, layers=10)
    (record,) = run([one()], instances, migration=migration, links=links).records
    assert record.kv_transfer_s == pytest.approx(kv_transfer_s)
    assert (record.ttft_s, record.output_tokens) == (pytest.approx(FIRST + kv_transfer_s), 10)


def test_a_migrator_that_waits_for_the_end_of_the_prefill_moves_everything_after_it():
    instances = tuple(replace(each, kv_bytes_per_token=1_000_000) for each in (PREFILL, DECODE))
    settings = SimulationSettings(instances, links=LinkSettings(20.0, 0.0, overlap=True, layers=10))
    migrator = build_migrator("slackline", {"migrator": {"overlap": False}})
    (record,) = Simulation(settings, build_dispatcher("slackline"), [one()], migrator=migrator).run().records
    assert record.kv_transfer_s == pytest.approx(0.1 / 20)


@pytest.mark.parametrize("network_s", [0.0, 0.003])
def test_overlap_loses_nothing_and_invents_nothing(network_s):
    """Also with dead links, a dead prefill instance and a decode stage that is short of room."""
    instances = tuple(replace(each, kv_bytes_per_token=100_000) for each in TWO_AND_TWO)
    demands = some_demands(150, rate=60.0)
    links = LinkSettings(2.0, 0.001, overlap=True, layers=4, failures=(LinkFailure(3, 0.5, 0.4),))
    result = run(demands, instances, links=links, network_s=network_s, failures=(Failure(0, 1.0, 1.0),))
    assert sorted(record.id for record in result.records) == sorted(demand.id for demand in demands)
    for record in result.records:
        assert record.outcome is Outcome.OK
        assert record.output_tokens == len(record.token_times)
        assert list(record.token_times) == sorted(record.token_times)


def test_the_network_delays_every_message_of_a_kv_transfer():
    """First token to the gateway, placement to the decode instance: two delays before anything moves."""
    (near,) = run([one()], (PREFILL, DECODE), links=FREE).records
    (far,) = run([one()], (PREFILL, DECODE), links=FREE, network_s=0.02).records
    assert near.kv_transfer_s == pytest.approx(0.0, abs=1e-5)
    assert far.kv_transfer_s == pytest.approx(0.04, abs=1e-5)


# ---- failures -----------------------------------------------------------------------------------------------------


def test_a_dead_decode_instance_cuts_what_decodes_there_and_nothing_else():
    demands = some_demands(100, rate=40.0)
    result = run(demands, failures=(Failure(3, 1.0),))
    outcomes = {record.outcome for record in result.records}
    assert outcomes == {Outcome.OK, Outcome.CUT}
    for record in result.records:
        if record.outcome is Outcome.CUT:
            assert record.instance == "engine-3"
            assert record.at < 1.0
            assert 0 < record.output_tokens < 60
    assert all(r.instance != "engine-3" or r.at < 1.0 for r in result.records)


def slow_links(**more):
    return LinkSettings(bandwidth_gb_s=1.0, latency_s=0.0, **more)


def heavy(*instances):
    return tuple(replace(each, kv_bytes_per_token=1_000_000) for each in instances)


def test_a_decode_instance_that_dies_during_the_transfer_is_replaced():
    instances = heavy(PREFILL, DECODE, DECODE)
    (record,) = run([one(prompt=500)], instances, links=slow_links(), failures=(Failure(1, 0.2),)).records
    assert (record.outcome, record.instance, record.attempts) == (Outcome.OK, "engine-2", 1)
    assert record.ttft_s == pytest.approx(0.2 + 0.5)


def test_a_prefill_instance_that_dies_during_the_transfer_is_prefilled_again_elsewhere():
    instances = heavy(PREFILL, PREFILL, DECODE)
    (record,) = run([one(prompt=500)], instances, links=slow_links(), failures=(Failure(0, 0.2),)).records
    assert (record.outcome, record.prefill_instance, record.attempts) == (Outcome.OK, "engine-1", 2)
    assert record.output_tokens == len(record.token_times) == 10
    assert record.ttft_s > 0.2 + 0.5  # the client had nothing of the first prefill


def test_a_prefill_instance_that_dies_before_the_first_token_changes_nothing_for_the_client():
    demands = [replace(each, at=0.48) for each in some_demands(10)]
    result = run(demands, policy="round_robin", failures=(Failure(0, 0.5),))
    assert {record.outcome for record in result.records} <= {Outcome.OK, Outcome.CUT}
    assert sum(record.outcome is Outcome.CUT for record in result.records) == 0
    assert max(record.attempts for record in result.records) == 2


def test_without_any_decode_instance_left_the_answer_ends_with_an_error():
    (record,) = run([one()], (PREFILL, DECODE), hold_s=2.0, failures=(Failure(1, 0.001),)).records
    assert (record.outcome, record.reason) == (Outcome.FAILED, "no_decode_instance")
    assert record.output_tokens == 0


def test_a_decode_instance_that_comes_back_takes_what_waited():
    (record,) = run([one()], (PREFILL, DECODE), failures=(Failure(1, 0.001, 3.0),)).records
    assert (record.outcome, record.instance) == (Outcome.OK, "engine-1-1")
    assert record.kv_transfer_s > 2.9


def test_a_broken_link_is_gone_around():
    instances = heavy(PREFILL, DECODE, DECODE)
    links = slow_links(failures=(LinkFailure(1, 0.2, 10.0),))
    (record,) = run([one(prompt=500)], instances, links=links).records
    assert (record.outcome, record.instance) == (Outcome.OK, "engine-2")


def test_a_link_that_stays_broken_ends_the_answer_and_one_that_heals_does_not():
    for seconds, outcome in ((1e6, Outcome.FAILED), (0.02, Outcome.OK)):
        links = slow_links(failures=(LinkFailure(0, 0.2, seconds),))
        (record,) = run([one(prompt=500)], heavy(PREFILL, DECODE), links=links).records
        assert record.outcome is outcome


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(list(MIGRATIONS)),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 3.0), st.one_of(st.none(), st.floats(0.1, 2.0))), max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 3.0), st.floats(0.05, 1.0)), max_size=3),
    st.sampled_from([1024, 4096]),
    st.sampled_from([0.0, 0.01]),
)
# Both decode instances fail, the second with an answer that came to it from the first.
@example(1081, "least_outstanding", [(2, 2.0, None), (3, 1.0, None)], [], 4096, 0.0)
def test_whatever_breaks_every_request_ends_once(seed, migration, dead, broken, kv_tokens, network_s):
    demands = some_demands(40, rate=30.0, seed=seed)
    instances = [replace(each, kv_tokens=kv_tokens) for each in TWO_AND_TWO]
    links = LinkSettings(bandwidth_gb_s=0.5, failures=tuple(LinkFailure(*each) for each in broken))
    failures = tuple(Failure(slot, at, seconds or (1.0 if slot == 0 else None)) for slot, at, seconds in dead)
    more = {"links": links, "failures": failures, "network_s": network_s, "cutoff_s": 90.0}
    result = run(demands, instances, "slackline", migration, hold_s=2.0, **more)
    assert sorted(r.id for r in result.records) == sorted(d.id for d in demands)
    wanted = {d.id: d.output_tokens for d in demands}
    for record in result.records:
        assert len(record.token_times) == record.output_tokens
        assert list(record.token_times) == sorted(record.token_times)
        assert record.output_tokens == wanted[record.id] or record.outcome is not Outcome.OK
        assert record.reason != "cut_off"


# ---- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instances", "change", "field"),
    [
        ((PREFILL,), {}, "instances.role"),
        ((SMALL, DECODE), {}, "instances.role"),
        (TWO_AND_TWO, {"links": LinkSettings(failures=(LinkFailure(4, 1.0, 1.0),))}, "links.failures.instance"),
    ],
)
def test_bad_clusters_are_refused(instances, change, field):
    with pytest.raises(ConfigError) as caught:
        SimulationSettings(instances, **change)
    assert caught.value.field == field


def test_an_unknown_role_is_refused():
    with pytest.raises(ConfigError, match="valid: collocated, decode, prefill") as caught:
        replace(SMALL, role="both")
    assert caught.value.field == "role"


@pytest.mark.parametrize("policy", list(POLICY_SETS))
def test_every_policy_set_serves_both_stages(policy):
    targets = Targets(1.0, 0.1, None, 3600.0)
    result = run(some_demands(40, rate=10.0, targets=targets), policy=policy)
    assert len(result.records) == 40
    assert all(record.attained for record in result.records)


def test_collocated_instances_may_stand_beside_them():
    result = run(some_demands(100, rate=60.0), (SMALL, PREFILL, DECODE), "round_robin")
    assert {record.instance for record in result.records if record.output_tokens > 1} == {"engine-0", "engine-2"}
    assert all(record.outcome is Outcome.OK for record in result.records)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("network_s", [0.0, 0.002])  # without a network a prompt's step begins as it is sent
@pytest.mark.parametrize("migration", list(MIGRATIONS))
def test_where_an_engine_computes_kv_that_no_one_reads_others_are_soon_asked_alone(monkeypatch, migration, network_s):
    reserve = SimulatedTransfers._reserve

    def picky(stages, place):
        if place.source == "engine-0":
            stages._failed(place.request.id, place.target, "other_model")
        else:
            reserve(stages, place)

    monkeypatch.setattr(SimulatedTransfers, "_reserve", picky)
    demands = some_demands(150, rate=10.0)
    result = run(demands, migration=migration, network_s=network_s)
    assert {record.outcome for record in result.records} == {Outcome.OK}
    assert {record.prefill_instance for record in result.records if record.output_tokens > 1} <= {"engine-1"}
    wasted = next(use for use in result.instances if use.id == "engine-0")
    assert not network_s or 0 < wasted.prompt_tokens < sum(demand.prompt_tokens for demand in demands) / 5
