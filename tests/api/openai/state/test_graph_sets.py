"""A gateway takes over new pattern graphs while it runs, and uses none that are damaged, too old or of another
release."""

from __future__ import annotations

import hashlib

import pytest

from api.openai.state.graph_sets import GraphSets
from controller.predict.answer_lengths import MOST_AGE_S, PublishedVersion, VersionOutcome
from controller.predict.pattern_graphs import Call, graph_of, set_of

NOW = 1_000_000.0
CONTENT = set_of([graph_of([Call(1, 0.0, 2.0, 5, 5), Call(2, 2.0, 3.0, 5, 5)])], [1.0], {}).to_bytes()


class Taken:
    """Of a store that publishes version after version for one tenant, and what a gateway was given."""

    def __init__(self) -> None:
        self.now = NOW
        self.in_force: list[dict[str, int]] = []
        self.outcomes: list[VersionOutcome] = []
        self.contents: dict[int, bytes] = {}
        self.versions: list[PublishedVersion] = []
        self.sets = GraphSets(self, lambda found: self.in_force.append({k: v.version for k, v in found.items()}),
                              self.outcomes.extend, lambda: self.now)  # fmt: skip

    def graph_versions(self) -> list[PublishedVersion]:
        return self.versions

    def graph_content(self, tenant: str, version: int) -> bytes | None:
        return self.contents.get(version)

    async def publish(self, version: int, content: bytes, digest: str = "") -> None:
        self.contents[version] = content
        own = hashlib.sha256(content).hexdigest()
        self.versions = [PublishedVersion("acme", version, NOW, digest or own)]
        await self.sets.poll()


async def test_new_graphs_are_taken_over_once_and_until_they_are_too_old():
    taken = Taken()
    await taken.publish(1, CONTENT)
    await taken.sets.poll()
    await taken.publish(2, CONTENT)
    taken.now += MOST_AGE_S + 1
    await taken.sets.poll()
    assert taken.in_force == [{"acme": 1}, {"acme": 2}, {}]
    assert "7 days" in taken.sets.refused["acme"]


@pytest.mark.parametrize(
    ("content", "digest", "why"),
    [
        (CONTENT[:-1] + b"x", hashlib.sha256(CONTENT).hexdigest(), "damaged"),
        (CONTENT[:-1] + b"x", "", "damaged"),  # published as it is
        (b"slackline pattern graphs 9\nrest", "", "no set of pattern graphs of this version"),
        (b"slackline length forest 1\nrest", "", "no set of pattern graphs of this version"),
    ],
)
async def test_damaged_graphs_and_those_of_another_release_are_refused(content, digest, why):
    taken = Taken()
    await taken.publish(1, CONTENT)
    await taken.publish(2, content, digest)
    assert taken.in_force == [{"acme": 1}, {}]
    assert why in taken.sets.refused["acme"]
    await taken.publish(3, CONTENT)
    assert taken.in_force[-1] == {"acme": 3}
    assert [(each.version, why in each.problem) for each in taken.outcomes] == [(1, False), (2, True), (3, False)]
