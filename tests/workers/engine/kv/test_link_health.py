"""A link's state from what happened on it."""

from controller.core.kv_links import LinkReport, LinkState, moved_from_json, report_from_json
from workers.engine.kv.link_health import LinkHealth, LinkLimits

MIB = 1 << 20


def up() -> LinkHealth:
    health = LinkHealth(LinkLimits(slow_share=0.25, remember_s=10.0))
    health.connected()
    health.measured(MIB, 0.01)
    return health


def test_it_is_connecting_until_something_answered():
    health = LinkHealth()
    assert health.state(0.0) is LinkState.CONNECTING
    health.connected()
    assert health.state(0.0) is LinkState.UP


def test_no_one_there_from_the_start_is_down():
    health = LinkHealth()
    health.lost("refused", 1.0)
    assert (health.state(1.0), health.down_since, health.last_error) == (LinkState.DOWN, 1.0, "refused")


def test_down_is_counted_from_its_first_failure_and_ends_degraded_then_up():
    health = up()
    health.lost("gone", 5.0)
    health.lost("still gone", 7.0)
    assert (health.state(8.0), health.down_since) == (LinkState.DOWN, 5.0)
    health.connected()
    assert health.state(8.0) is LinkState.DEGRADED
    assert health.state(17.1) is LinkState.UP


def test_a_failed_transfer_degrades_a_link_that_still_answers():
    health = up()
    health.failed("cut", 3.0, nbytes=500)
    assert (health.state(4.0), health.failures, health.bytes) == (LinkState.DEGRADED, 1, 500)
    assert health.state(13.1) is LinkState.UP
    assert health.last_error == "cut"


def test_far_slower_than_it_was_is_degraded():
    health = up()  # 100 MiB/s
    for _ in range(12):
        health.moved(MIB, 0.1)  # 10 MiB/s: the mean falls below a quarter
    assert health.state(0.0) is LinkState.DEGRADED
    assert (health.transfers, health.bytes) == (12, 12 * MIB)


def test_small_transfers_do_not_speak_of_bandwidth():
    health = up()
    before = health.bandwidth_bytes_s
    health.moved(1000, 1.0)
    assert health.bandwidth_bytes_s == before


def test_latency_is_half_a_round_trip_and_a_mean():
    health = up()
    health.answered(0.002)
    assert health.latency_s == 0.001
    health.answered(0.004)
    assert health.latency_s == 0.001 + 0.3 * 0.001


def test_reports_survive_json_and_keys_of_newer_engines():
    report = up().report("p", "host", 7, 0.0)
    raw = {**report._asdict(), "state": "up", "later": 1}
    assert report_from_json(raw) == report
    assert isinstance(report, LinkReport)
    assert moved_from_json({"bytes": 5, "seconds": 1, "what": 2}).bytes == 5
    assert moved_from_json("x") is None
    assert moved_from_json({"bytes": "many"}) is None
    for beyond in (float("inf"), 1e30, -1e30, 2**63):  # no journal holds it
        assert moved_from_json({"bytes": beyond}) is None


def test_transfers_that_wait_for_their_prefill_measure_nothing_and_ask_for_a_probe():
    health = LinkHealth()
    assert health.wants_probe
    health.measured(4 << 20, 0.004)
    assert not health.wants_probe
    speed = health.bandwidth_bytes_s
    health.moved(4 << 20, 0.0)
    assert (health.bandwidth_bytes_s, health.transfers, health.wants_probe) == (speed, 1, True)
    health.measured(4 << 20, 0.004)
    assert not health.wants_probe


def test_a_link_that_has_become_slow_is_probed_until_it_is_not():
    health = LinkHealth()
    health.connected()
    health.measured(4 << 20, 0.001)
    for _ in range(20):
        health.measured(4 << 20, 1.0)
    assert (health.slow, health.wants_probe, health.state(100.0)) == (True, True, LinkState.DEGRADED)
    while health.wants_probe:
        health.measured(4 << 20, 0.001)
    assert health.state(100.0) is LinkState.UP
