"""Who keeps a link to whom."""

from workers.actions.peers import PeerMember, need_links, peers


def member(name, role="decode", model="m", no_weights=False, host="h", borrows=False):
    return PeerMember(name, model, role, host, 1, no_weights, borrows)


def ids(found):
    return {name: [each.id for each in sources] for name, sources in found.items()}


def test_both_stages_of_a_model_are_linked_both_ways():
    found = peers([member("d"), member("p", "prefill"), member("x", "prefill", model="other")])
    assert ids(found) == {"d": ["p"], "p": ["d"], "x": []}


def test_the_same_stage_too_because_roles_change():
    assert ids(peers([member("d"), member("e")])) == {"d": ["e"], "e": ["d"]}


def test_collocated_engines_exchange_nothing_but_with_one_that_has_no_weights():
    fleet = [member("a", "collocated"), member("b", "collocated"), member("w", "collocated", no_weights=True)]
    assert ids(peers(fleet)) == {"a": [], "b": [], "w": ["a", "b"]}
    assert need_links(fleet)
    assert not need_links(fleet[:2])


def test_one_that_does_not_say_where_it_is_reached_is_no_source():
    assert ids(peers([member("d"), member("p", "prefill", host="")])) == {"d": [], "p": ["d"]}


def test_one_that_borrows_prefixes_is_linked_from_every_engine_of_its_model():
    """Whatever its role and theirs, but from none without weights, which has no KV either."""
    fleet = [
        member("a", "collocated", borrows=True),
        member("b", "collocated"),
        member("p", "prefill", borrows=True),
        member("w", "collocated", no_weights=True),
        member("x", "collocated", model="other"),
    ]
    assert ids(peers(fleet)) == {"a": ["b", "p"], "b": [], "p": ["a", "b"], "w": ["a", "b", "p"], "x": []}
    assert need_links(fleet[:1])
