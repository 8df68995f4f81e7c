"""Which members of a group hold the experts that tokens go to, learned from batches that have ended (MFS app. B).

A *member* is a rank of an expert-parallel group, or an expert. Where tokens go is known only once they have been
computed, so the traffic of a batch that waits is expected by the shares that earlier ones had.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from controller.core.errors import ConfigError

Traffic = dict[tuple[int, int], float]  # bytes by sending and receiving member; pairs that exchange nothing are absent


@dataclass(frozen=True, slots=True)
class ExpertHistoryConfig:
    """- `half_tokens`: after so many routed tokens an earlier batch counts half. One that goes to two experts counts
      twice.
    - `least_tokens`: until so many were seen, shares are even.
    - `layers`: of all models together that are remembered at most; the one that was learned longest ago is forgotten.
    """

    half_tokens: float = 65_536.0
    least_tokens: float = 4_096.0
    layers: int = 4_096

    def __post_init__(self) -> None:
        if not 0 < self.half_tokens < math.inf:
            raise ConfigError("half_tokens must be positive and finite", field="half_tokens")
        if not 0 <= self.least_tokens < math.inf:
            raise ConfigError("least_tokens must be finite and not negative", field="least_tokens")
        if self.layers < 1:
            raise ConfigError("layers must be at least 1", field="layers")


@dataclass(slots=True)
class _Learned:
    sums: list[float]  # of shares by member, each batch by its weight
    tokens: float = 0.0


class ExpertHistory:
    """Shares of the members by model and layer, as an exponential average over tokens.

    A layer of None stands for all layers of a model, where these are not told apart. Layers do not learn from each
    other.
    """

    def __init__(self, config: ExpertHistoryConfig | None = None) -> None:
        self.config = config or ExpertHistoryConfig()
        self._learned: OrderedDict[tuple[str, int | None], _Learned] = OrderedDict()

    def __len__(self) -> int:
        """Layers that are remembered."""
        return len(self._learned)

    def learn(self, model: str, members: int, routed: Mapping[int, float], layer: int | None = None) -> None:
        """A batch has ended, of which so many tokens went to each member; to those that are not named none did.

        Raises ConfigError that names `members` for a group of another size than before, and `routed` for a member that
        the group does not have, for a number that is negative or not finite, and for a batch without tokens.
        """
        known = self._of(model, members, layer)
        for member, tokens in routed.items():
            if not 0 <= member < members:
                raise ConfigError(f"{model!r} has no member {member}, only 0 to {members - 1}", field="routed")
            if not 0 <= tokens < math.inf:
                raise ConfigError(f"tokens of member {member} must be finite and not negative", field="routed")
        total = sum(routed.values())
        if total <= 0:
            raise ConfigError("no tokens were routed", field="routed")
        key = model, layer
        if known is None:
            known = self._learned[key] = _Learned([0.0] * members)
        kept = 0.5 ** (total / self.config.half_tokens)
        for member in range(members):
            known.sums[member] = kept * known.sums[member] + (1.0 - kept) * routed.get(member, 0.0) / total
        known.tokens += total
        self._learned.move_to_end(key)
        if len(self._learned) > self.config.layers:
            self._learned.popitem(last=False)

    def shares(self, model: str, members: int, layer: int | None = None) -> list[float]:
        """The part of a batch's tokens that is expected at each member; even until enough was seen. Raises ConfigError
        that names `members` for a group of another size than was learned."""
        known = self._of(model, members, layer)
        if known is None or known.tokens < self.config.least_tokens:
            return list(repeat(1.0 / members, members))
        weight = sum(known.sums)
        return [each / weight for each in known.sums]

    def _of(self, model: str, members: int, layer: int | None) -> _Learned | None:
        if members < 1:
            raise ConfigError("members must be at least 1", field="members")
        known = self._learned.get((model, layer))
        if known is not None and len(known.sums) != members:
            raise ConfigError(f"{model!r} has {len(known.sums)} members, not {members}", field="members")
        return known


def expected_traffic(tokens: Mapping[int, float], shares: Sequence[float], token_bytes: float) -> Traffic:
    """What members exchange: each token goes from the member that holds its request to those of its experts, and comes
    back (dispatch and combine). `tokens`: by member that holds them. `token_bytes`: of a token on one way, for all
    experts that it goes to.

    Raises ConfigError that names `tokens` for a member without a share, or a number that is negative or not finite.
    """
    traffic: Traffic = {}
    for member, count in tokens.items():
        if not 0 <= member < len(shares):
            raise ConfigError(f"member {member} has no share, only 0 to {len(shares) - 1}", field="tokens")
        if not 0 <= count < math.inf:
            raise ConfigError(f"tokens of member {member} must be finite and not negative", field="tokens")
        for other, share in enumerate(shares):
            size = count * share * token_bytes
            if other != member and size > 0:
                traffic[member, other] = traffic.get((member, other), 0.0) + size
                traffic[other, member] = traffic.get((other, member), 0.0) + size
    return traffic


def port_loads(traffic: Mapping[tuple[int, int], float], hosts: Sequence[int]) -> dict[int, float]:
    """Bytes that each member sends to members on other hosts. It receives as many, since all that goes comes back.
    `hosts`: of each member."""
    found: dict[int, float] = {}
    for (sender, receiver), size in traffic.items():
        if hosts[sender] != hosts[receiver]:
            found[sender] = found.get(sender, 0.0) + size
    return found
