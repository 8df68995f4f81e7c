"""What gateways say of their queues, merged into one picture that is right or known not to be.

Each gateway's changes go from one version of its feed to the next. One that does not start at the version held here
means that a message was lost: the gateway is *behind*, its rows stay as they are, changes are kept, and a whole state
puts it right. A gateway that has fallen silent leaves the picture with its rows. Times are arguments, in epoch seconds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from console.live.queue_filter import haystack, words_of
from controller.core.messages import QueueChanges, QueueRow, QueueState

GONE_AFTER_S = 5.0  # gateways speak four times a second
CHANGES_KEPT = 240  # a minute's, while a whole state is on its way
UNKNOWN = -1

Kind = tuple[str, str]  # tenant, class
Due = tuple[float, str]  # what the page is sorted by: the instant to start by, id
Place = tuple[list[float], float, str]  # the dispatcher's order: rank, arrival, id


class Sorted:
    """Few changes at a time in a long list: ten thousand rows move in microseconds."""

    def __init__(self) -> None:
        self._keys: list[tuple[object, ...]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[tuple[object, ...]]:
        return iter(self._keys)

    def __getitem__(self, part: slice) -> list[tuple[object, ...]]:
        return self._keys[part]

    def add(self, key: tuple[object, ...]) -> None:
        insort(self._keys, key)

    def remove(self, key: tuple[object, ...]) -> None:
        del self._keys[self.index(key)]

    def index(self, key: tuple[object, ...]) -> int:
        return bisect_left(self._keys, key)


class Ids(Sequence[str]):
    """The ids of a sorted list of (instant, id), read only where they are looked at. It changes with the list."""

    def __init__(self, keys: Sorted) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, part: int) -> str: ...

    @overload
    def __getitem__(self, part: slice) -> list[str]: ...

    def __getitem__(self, part: int | slice) -> str | list[str]:
        if isinstance(part, int):
            return str(self._keys[part : part + 1][0][1])
        return [str(key[1]) for key in self._keys[part]]

    def __iter__(self) -> Iterator[str]:
        return (str(key[1]) for key in self._keys)


NONE = Sorted()


class Shown(NamedTuple):
    """Where a row is in its gateway's order of service: `ahead` go first, `rate` a second are served of its model."""

    row: QueueRow
    at: float
    ahead: int
    rate: float


class _Gateway:
    def __init__(self) -> None:
        self.feed = ""
        self.version = UNKNOWN
        self.at = 0.0
        self.heard = 0.0
        self.rates: dict[str, float] = {}
        self.rows: dict[str, QueueRow] = {}
        self.orders: dict[str, Sorted] = {}  # by model
        self.pending: deque[QueueChanges] = deque(maxlen=CHANGES_KEPT)
        self.behind = True


class QueueMirror:
    """The queues of all gateways. `version` goes up with each change of what a page could show."""

    def __init__(self) -> None:
        self.version = 0
        self._gateways: dict[str, _Gateway] = {}
        self._owner: dict[str, _Gateway] = {}  # by request
        self._texts: dict[str, str] = {}  # by request: what a filter looks in
        self._all = Sorted()
        self._kinds: dict[Kind, Sorted] = {}

    def __len__(self) -> int:
        return len(self._all)

    @property
    def behind(self) -> bool:
        """Is a whole state of some gateway needed?"""
        return any(gateway.behind for gateway in self._gateways.values())

    @property
    def gateways(self) -> int:
        return len(self._gateways)

    # ---- what gateways say ----------------------------------------------------------------------------------------

    def take(self, changes: QueueChanges, now: float) -> None:
        """Changes as they come; the same ones twice, or late, are taken once."""
        gateway = self._gateways.setdefault(changes["gateway"], _Gateway())
        if changes["at"] <= gateway.at:
            return
        gateway.at, gateway.heard = changes["at"], now
        gateway.pending.append(changes)
        gateway.behind = not self._caught_up(gateway)

    def take_whole(self, state: QueueState, now: float) -> None:
        """A whole state, and whatever of the kept changes comes after it."""
        gateway = self._gateways.get(state["gateway"])
        if gateway is None:
            if now - state["at"] > GONE_AFTER_S:
                return  # left behind in Redis by a gateway that has died
            gateway = self._gateways[state["gateway"]] = _Gateway()
            gateway.at, gateway.heard = state["at"], now
        elif not gateway.behind or self._foreign(gateway, state):
            return
        rows = {row["id"]: row for row in state["rows"]}
        for request_id in [each for each in gateway.rows if each not in rows]:
            self._remove(gateway, request_id)
        for row in rows.values():
            self._put(gateway, row)
        gateway.feed, gateway.version, gateway.rates = state["feed"], state["version"], state["rates"]
        self.version += 1
        gateway.behind = not self._caught_up(gateway)

    def forget_silent(self, now: float) -> None:
        """Drops gateways not heard of for `GONE_AFTER_S`: call it only while they could be heard."""
        for name in [name for name, each in self._gateways.items() if now - each.heard > GONE_AFTER_S]:
            gateway = self._gateways.pop(name)
            for request_id in list(gateway.rows):
                self._remove(gateway, request_id)
            self.version += 1

    def _foreign(self, gateway: _Gateway, state: QueueState) -> bool:
        """Is the state of another feed than the newest changes are, or of a version that has been passed?"""
        if gateway.pending and gateway.pending[-1]["feed"] != state["feed"]:
            return True
        return gateway.feed == state["feed"] and state["version"] < gateway.version

    def _caught_up(self, gateway: _Gateway) -> bool:
        """Applies the kept changes that follow; True if none is left over and the count agrees."""
        while gateway.pending:
            changes = gateway.pending[0]
            if changes["feed"] != gateway.feed:
                # Of an older feed than the state; or of a newer one, which its own state will start.
                if gateway.pending[-1]["feed"] == changes["feed"]:
                    return False
                gateway.pending.popleft()
                continue
            if changes["version"] > gateway.version:
                if changes["base"] != gateway.version:
                    return False
                self._apply(gateway, changes)
            gateway.pending.popleft()
            self._rates(gateway, changes)
            if changes["version"] == gateway.version and changes["total"] != len(gateway.rows):
                gateway.version = UNKNOWN  # whatever it was: only a whole state puts it right
                return False
        return gateway.version != UNKNOWN

    def _apply(self, gateway: _Gateway, changes: QueueChanges) -> None:
        for request_id in changes["gone"]:
            self._remove(gateway, request_id)
        for row in changes["put"]:
            self._put(gateway, row)
        gateway.version = changes["version"]
        self.version += 1

    def _rates(self, gateway: _Gateway, changes: QueueChanges) -> None:
        if changes["rates"] != gateway.rates:
            gateway.rates = changes["rates"]
            self.version += 1

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _put(self, gateway: _Gateway, row: QueueRow) -> None:
        known = gateway.rows.get(row["id"])
        if known == row:
            return
        if known is not None:
            self._remove(gateway, row["id"])
        gateway.rows[row["id"]] = row
        self._owner[row["id"]] = gateway
        self._texts[row["id"]] = haystack(row)
        self._all.add(_due(row))
        self._kinds.setdefault(_kind(row), Sorted()).add(_due(row))
        gateway.orders.setdefault(row["model"], Sorted()).add(_place(row))

    def _remove(self, gateway: _Gateway, request_id: str) -> None:
        row = gateway.rows.pop(request_id, None)
        if row is None:
            return
        del self._owner[request_id], self._texts[request_id]
        self._all.remove(_due(row))
        kind = self._kinds[_kind(row)]
        kind.remove(_due(row))
        if not len(kind):
            del self._kinds[_kind(row)]
        gateway.orders[row["model"]].remove(_place(row))

    # ---- for pages ------------------------------------------------------------------------------------------------

    def oldest_at(self) -> float | None:
        """Of the gateway heard of longest ago; None without any."""
        return min((gateway.at for gateway in self._gateways.values()), default=None)

    def kinds(self) -> list[tuple[Kind, int, float]]:
        """Tenant and class, how many wait, the earliest instant one of them has to start by."""
        return [(kind, len(rows), float(rows[:1][0][0])) for kind, rows in sorted(self._kinds.items())]  # type: ignore[arg-type]

    def ids(self, kind: Kind | None = None, text: str = "") -> Sequence[str]:
        """What waits, the most urgent first; of one class, or what a text finds (see queue_filter)."""
        chosen = self._all if kind is None else self._kinds.get(kind, NONE)
        words = words_of(text)
        if not (words.anywhere or words.exactly):
            return Ids(chosen)
        texts, owner = self._texts, self._owner
        return [each for each in Ids(chosen) if words.match(owner[each].rows[each], texts[each])]

    def shown(self, request_id: str) -> Shown | None:
        """None when it waits no more."""
        gateway = self._owner.get(request_id)
        if gateway is None:
            return None
        row = gateway.rows[request_id]
        ahead = gateway.orders[row["model"]].index(_place(row))
        return Shown(row, gateway.at, ahead, gateway.rates.get(row["model"], 0.0))


def _due(row: QueueRow) -> Due:
    return row["due_at"], row["id"]


def _kind(row: QueueRow) -> Kind:
    return row["tenant"], row["slo_class"]


def _place(row: QueueRow) -> Place:
    return row["order"], row["arrived_at"], row["id"]
