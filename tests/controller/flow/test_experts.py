"""Shares of experts learned from ended batches, the traffic they let expect, and what pruning makes of it."""

import math
from dataclasses import fields

import pytest

from controller.core.errors import ConfigError
from controller.flow.batches import Batch, BatchRequest, order_batches
from controller.flow.experts import ExpertHistory, ExpertHistoryConfig, expected_traffic, port_loads

HALF = ExpertHistoryConfig(half_tokens=1_000, least_tokens=1_000)
POPULAR = [0.7, 0.1, 0.1, 0.1]  # shares of four members, each on a host of its own
EVEN = [0.25] * 4
APART = range(4)


def learned(*batches, config=HALF):
    history = ExpertHistory(config)
    for routed in batches:
        history.learn("m", 2, dict(enumerate(routed)))
    return history.shares("m", 2)


def test_shares_are_an_average_over_tokens_with_later_batches_first():
    assert learned([750, 250]) == pytest.approx([0.75, 0.25])
    # The first batch weighs 0.5, and half of that after 1,000 tokens more: (0.25 x 0.75 + 0.5 x 0.25) / 0.75
    assert learned([750, 250], [250, 750]) == pytest.approx([5 / 12, 7 / 12])
    # A batch of 2,000 tokens weighs 0.75, and a quarter of the first one's 0.5 is left.
    assert learned([750, 250], [500, 1_500]) == pytest.approx([(0.125 * 0.75 + 0.75 * 0.25) / 0.875, 0.6785714])


def test_a_change_of_popularity_is_followed():
    shares = learned(*[[900, 100]] * 20, *[[100, 900]] * 5)
    assert shares == pytest.approx([0.125, 0.875], abs=0.0001)  # 0.1 + 0.8 / 32


def test_shares_are_even_until_enough_was_seen():
    assert ExpertHistory().shares("m", 4) == EVEN
    assert learned([999, 0]) == [0.5, 0.5]
    assert learned([999, 0], [1, 0]) == [1.0, 0.0]


def test_models_and_layers_learn_apart():
    history = ExpertHistory(HALF)
    history.learn("m", 2, {0: 1_000.0}, layer=3)
    assert history.shares("m", 2, layer=3) == [1.0, 0.0]
    assert history.shares("m", 2, layer=4) == history.shares("m", 2) == history.shares("n", 2, layer=3) == [0.5, 0.5]


def test_the_layer_learned_longest_ago_is_forgotten():
    history = ExpertHistory(ExpertHistoryConfig(least_tokens=0, layers=2))
    for layer in (1, 2, 1, 3):
        history.learn("m", 2, {0: 10.0}, layer)
    assert len(history) == 2
    assert [history.shares("m", 2, layer)[0] for layer in (1, 2, 3)] == [1.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("members", "routed", "field", "text"),
    [
        (2, {}, "routed", "no tokens"),
        (2, {0: 0.0, 1: 0.0}, "routed", "no tokens"),
        (2, {2: 5.0}, "routed", "no member 2, only 0 to 1"),
        (2, {-1: 5.0}, "routed", "no member -1"),
        (2, {0: -1.0, 1: 5.0}, "routed", "tokens of member 0"),
        (2, {1: math.nan}, "routed", "tokens of member 1"),
        (2, {1: math.inf}, "routed", "tokens of member 1"),
        (4, {0: 5.0}, "members", "'m' has 2 members, not 4"),
        (0, {0: 5.0}, "members", "at least 1"),
    ],
)
def test_a_wrong_batch_is_refused_and_changes_nothing(members, routed, field, text):
    history = ExpertHistory(HALF)
    history.learn("m", 2, {0: 600.0, 1: 400.0})
    with pytest.raises(ConfigError, match=text) as error:
        history.learn("m", members, routed)
    assert error.value.field == field
    assert history.shares("m", 2) == pytest.approx([0.6, 0.4])


def test_shares_for_a_group_of_another_size_are_refused():
    history = ExpertHistory(HALF)
    history.learn("m", 2, {0: 600.0})
    with pytest.raises(ConfigError, match="'m' has 2 members, not 3") as error:
        history.shares("m", 3)
    assert error.value.field == "members"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"half_tokens": 0.0}, "half_tokens"),
        ({"half_tokens": math.inf}, "half_tokens"),
        ({"least_tokens": -1.0}, "least_tokens"),
        ({"least_tokens": math.nan}, "least_tokens"),
        ({"layers": 0}, "layers"),
    ],
)
def test_a_wrong_setting_names_its_field(given, field):
    with pytest.raises(ConfigError) as error:
        ExpertHistoryConfig(**given)
    assert error.value.field == field
    assert {each.name for each in fields(ExpertHistoryConfig)} == {"half_tokens", "least_tokens", "layers"}


def test_traffic_goes_to_experts_and_comes_back():
    """400 tokens of member 1, two bytes each: 70 % go to member 0, and those of its own experts nowhere."""
    traffic = expected_traffic({1: 400}, POPULAR, 2.0)
    assert traffic == pytest.approx({(1, 0): 560, (0, 1): 560, (1, 2): 80, (2, 1): 80, (1, 3): 80, (3, 1): 80})
    assert port_loads(traffic, APART) == pytest.approx({0: 560, 1: 720, 2: 80, 3: 80})
    assert port_loads(traffic, [0, 0, 1, 1]) == pytest.approx({1: 160, 2: 80, 3: 80})  # 0 and 1 share a host


def test_traffic_of_members_adds_up():
    both = expected_traffic({0: 100, 1: 100}, [0.5, 0.5], 1.0)
    assert both == {(0, 1): 100, (1, 0): 100}  # 50 of its own and 50 that it answers
    assert expected_traffic({0: 0}, [0.5, 0.5], 1.0) == {}


@pytest.mark.parametrize("tokens", [{4: 1.0}, {-1: 1.0}, {0: -1.0}, {0: math.nan}, {0: math.inf}])
def test_wrong_tokens_are_refused(tokens):
    with pytest.raises(ConfigError) as error:
        expected_traffic(tokens, EVEN, 1.0)
    assert error.value.field == "tokens"


def batch(shares, due, ranks):
    """A request of 400 tokens at each of these ranks."""
    requests = [
        BatchRequest(f"q{rank}", due, {str(port): size for port, size in loads.items()})
        for rank in ranks
        for loads in [port_loads(expected_traffic({rank: 400}, shares, 1.0), APART)]
    ]
    return order_batches([Batch("b", "u", 0.0, requests)], dict.fromkeys("0123", 1.0), 1, now=0.0)


def test_a_popular_members_port_makes_a_batch_late_that_even_shares_let_through():
    """Even: each port of the three 300 of its own and 200 of the others. By history 3 x 280 come to member 0."""
    even, known = (batch(shares, 600.0, ranks=(1, 2, 3)) for shares in (EVEN, POPULAR))
    assert not even.pruned
    assert even.finish_s["b"] == 500
    assert [(each.port, each.finish_s) for each in known.pruned] == [("0", pytest.approx(840))]
    assert known.finish_s["b"] == pytest.approx(560)


def test_tokens_that_lie_where_their_experts_are_make_nobody_late():
    """280 of 400 tokens need not leave member 0. Even shares would send 300, and prune."""
    even, known = (batch(shares, 200.0, ranks=(0,)) for shares in (EVEN, POPULAR))
    assert [each.finish_s for each in even.pruned] == [300]
    assert not known.pruned
    assert known.finish_s["b"] == pytest.approx(120)
