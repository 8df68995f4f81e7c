"""A gateway takes over a new forest while it runs, and uses none that is damaged, too old or of another release."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import pytest

from api.openai.state.length_forests import LengthForests
from controller.predict.answer_lengths import MOST_AGE_S, PublishedVersion, VersionOutcome
from tests.controller.predict.test_answer_lengths import forest

NOW = 1_000_000.0


class Store:
    """`contents` by version, of one model."""

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}
        self.versions: list[PublishedVersion] = []
        self.away = self.unwritable = False
        self.outcomes: list[VersionOutcome] = []

    def note(self, outcomes: Sequence[VersionOutcome]) -> None:
        if self.unwritable:
            raise ConnectionError("unwritable")
        self.outcomes += outcomes

    def publish(self, version: int, content: bytes, trained_at: float = NOW, digest: str = "") -> None:
        self.contents[version] = content
        own = hashlib.sha256(content).hexdigest()
        self.versions = [PublishedVersion("demo", version, trained_at, digest or own)]

    def publish_also(self, model: str, version: int, content: bytes, trained_at: float = NOW) -> None:
        self.contents[version] = content
        self.versions.append(PublishedVersion(model, version, trained_at, hashlib.sha256(content).hexdigest()))

    def length_versions(self) -> list[PublishedVersion]:
        if self.away:
            raise ConnectionError("away")
        return self.versions

    def length_content(self, model: str, version: int) -> bytes | None:
        return self.contents.get(version)


@pytest.fixture(scope="module")
def trained():
    return forest()


@pytest.fixture
def store():
    return Store()


class Taken:
    """The forests of a store, and what a gateway was given of them. `now`: epoch seconds."""

    def __init__(self, store: Store) -> None:
        self.now = NOW
        self.in_force: list[dict[str, int]] = []
        self.forests = LengthForests(
            store,
            lambda found: self.in_force.append({m: each.version for m, each in found.items()}),
            store.note,
            lambda: self.now,
        )


async def test_each_new_version_is_taken_over_once(store, trained):
    taken = Taken(store)
    await taken.forests.poll()
    store.publish(1, trained.to_bytes())
    await taken.forests.poll()
    await taken.forests.poll()
    store.publish(2, trained.to_bytes())
    await taken.forests.poll()
    assert taken.in_force == [{"demo": 1}, {"demo": 2}]


async def test_a_damaged_version_leaves_the_model_to_its_mean(store, trained, caplog):
    taken = Taken(store)
    store.publish(1, trained.to_bytes())
    await taken.forests.poll()
    store.publish(2, trained.to_bytes()[:-1] + b"x", digest=hashlib.sha256(trained.to_bytes()).hexdigest())
    await taken.forests.poll()
    assert taken.in_force == [{"demo": 1}, {}]
    assert "damaged" in taken.forests.refused["demo"]
    assert "the length forest of demo is not used: it is damaged" in caplog.text
    store.publish(3, trained.to_bytes())
    await taken.forests.poll()
    assert taken.in_force[-1] == {"demo": 3}
    assert not taken.forests.refused


@pytest.mark.parametrize("content", [b"", b"slackline length forest 9\nrest"])
async def test_what_is_no_forest_of_this_release_is_refused(store, content):
    taken = Taken(store)
    store.publish(1, content)
    await taken.forests.poll()
    assert taken.in_force == []
    assert "no length forest of this version" in taken.forests.refused["demo"]


async def test_a_forest_that_asks_for_other_features_is_refused(store, trained):
    taken = Taken(store)
    names = ("something", *trained.names[1:])
    store.publish(1, replace(trained, names=names).to_bytes())
    await taken.forests.poll()
    assert taken.in_force == []
    assert "another release" in taken.forests.refused["demo"]


async def test_one_whose_arrays_are_of_another_kind_costs_no_other_model_theirs(store, trained):
    """A whole file, as a defect of another release might write it."""
    taken = Taken(store)
    store.publish(1, trained.to_bytes())
    await taken.forests.poll()
    store.publish(2, replace(trained, feature=trained.feature.astype(str)).to_bytes())
    store.publish_also("other", 3, trained.to_bytes())
    await taken.forests.poll()
    assert taken.in_force[-1] == {"other": 3}
    assert "it cannot be opened" in taken.forests.refused["demo"]
    assert [(each.subject, each.version, bool(each.problem)) for each in store.outcomes] == [
        ("demo", 1, False), ("demo", 2, True), ("other", 3, False),
    ]  # fmt: skip


async def test_one_that_became_too_old_is_used_no_more(store, trained):
    taken = Taken(store)
    store.publish(1, trained.to_bytes())
    await taken.forests.poll()
    taken.now += MOST_AGE_S + 1
    store.away = True  # it is known without the database
    await taken.forests.poll()
    assert taken.in_force == [{"demo": 1}, {}]
    assert "7 days" in taken.forests.refused["demo"]


async def test_while_the_database_is_away_the_last_one_stays(store, trained, caplog):
    taken = Taken(store)
    store.publish(1, trained.to_bytes())
    await taken.forests.poll()
    store.away = True
    await taken.forests.poll()
    await taken.forests.poll()
    assert taken.in_force == [{"demo": 1}]
    assert caplog.text.count("the last ones stay") == 1


async def test_it_reports_which_digest_it_uses_since_when_and_why_it_does_not(store, trained):
    taken = Taken(store)
    content = trained.to_bytes()
    digest = hashlib.sha256(content).hexdigest()
    store.publish(1, content)
    await taken.forests.poll()
    taken.now += 60
    await taken.forests.poll()
    (first,) = taken.forests.report("lengths")
    assert (first["subject"], first["version"], first["digest"], first["taken_at"]) == ("demo", 1, digest, NOW)
    store.publish(2, content, trained_at=NOW + 60)
    await taken.forests.poll()
    (second,) = taken.forests.report("lengths")
    assert (second["version"], second["taken_at"]) == (2, NOW + 60)
    store.publish(3, content[:-1] + b"x", digest=digest)
    await taken.forests.poll()
    (third,) = taken.forests.report("lengths")
    assert (third["version"], third["digest"], third["taken_at"]) == (None, "", None)
    assert "damaged" in third["problem"]


async def test_what_became_of_each_version_is_noted_once_with_its_reason(store, trained):
    taken = Taken(store)
    content = trained.to_bytes()
    damaged, digest = content[:-1] + b"x", hashlib.sha256(content).hexdigest()
    for version, each in enumerate((content, content, damaged, damaged), 1):
        taken.now += 10
        store.publish(version, each, digest=digest)
        await taken.forests.poll()
        await taken.forests.poll()
    why = "it is damaged: its digest is another one"
    noted = [
        ("demo", 1, "", NOW + 10),
        ("demo", 2, "", NOW + 20),
        ("demo", 3, why, NOW + 30),
        ("demo", 4, why, NOW + 40),
    ]
    assert store.outcomes == [VersionOutcome(*each) for each in noted]


async def test_one_that_became_too_old_is_noted_beside_its_takeover(store, trained):
    taken = Taken(store)
    store.publish(1, trained.to_bytes())
    await taken.forests.poll()
    taken.now += MOST_AGE_S + 1
    await taken.forests.poll()
    assert [(each.version, "7 days" in each.problem) for each in store.outcomes] == [(1, False), (1, True)]


async def test_what_cannot_be_stored_is_kept_and_stored_later(store, trained, caplog):
    taken = Taken(store)
    store.unwritable = True
    store.publish(1, trained.to_bytes())
    await taken.forests.poll()
    store.publish(2, trained.to_bytes())
    await taken.forests.poll()
    assert taken.in_force == [{"demo": 1}, {"demo": 2}], "serving does not wait for it"
    assert (store.outcomes, caplog.text.count("is not stored yet")) == ([], 1)
    store.unwritable = False
    await taken.forests.poll()
    await taken.forests.poll()
    assert [each.version for each in store.outcomes] == [1, 2]


async def test_only_the_newest_outcomes_wait_to_be_stored(store, trained, monkeypatch):
    monkeypatch.setattr("api.openai.state.published.MOST_UNSTORED", 2)
    taken = Taken(store)
    store.unwritable = True
    for version in (1, 2, 3):
        store.publish(version, trained.to_bytes())
        await taken.forests.poll()
    store.unwritable = False
    await taken.forests.poll()
    assert [each.version for each in store.outcomes] == [2, 3]
