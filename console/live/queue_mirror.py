"""A mirror of all gateways' queues that is either correct or known to be behind.

Each message changes a gateway's feed from one version to the next. A message that does not start at the version held
here means that another was lost: the gateway is *behind*, its rows stay, later changes are kept, and a whole state
corrects it. A gateway that has stopped publishing is removed with its rows. Times are arguments, in epoch seconds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from console.live.queue_filter import haystack, words_of
from controller.core.messages import QueueChanges, QueueRow, QueueState

GONE_AFTER_S = 5.0  # gateways publish four times a second
CHANGES_KEPT = 240  # one minute of changes, while a whole state is on its way
UNKNOWN = -1

Kind = tuple[str, str]  # tenant, class
Due = tuple[float, str]  # the page's order: latest start time, id
Place = tuple[list[float], float, str]  # the dispatcher's order: rank, arrival, id


class Sorted:
    """A sorted list for few changes at a time: an insertion into ten thousand rows takes microseconds."""

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
    """A view of the ids in a sorted list of (time, id), without a copy. It changes with the list."""

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
    """A row and its place: `ahead` rows of its gateway go first; `rate` requests per second of its model start."""

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
    """The queues of all gateways. `version` increases with every change that a page could show."""

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
        """Is the whole state of any gateway needed?"""
        return any(gateway.behind for gateway in self._gateways.values())

    @property
    def gateways(self) -> int:
        return len(self._gateways)

    # ---- messages of gateways ----------------------------------------------------------------------------------------

    def take(self, changes: QueueChanges, now: float) -> None:
        """Takes changes as they arrive. Idempotent: duplicates and late messages are ignored."""
        gateway = self._gateways.setdefault(changes["gateway"], _Gateway())
        if changes["at"] <= gateway.at:
            return
        gateway.at, gateway.heard = changes["at"], now
        gateway.pending.append(changes)
        gateway.behind = not self._caught_up(gateway)

    def take_whole(self, state: QueueState, now: float) -> None:
        """Takes a whole state, then the kept changes that follow it."""
        gateway = self._gateways.get(state["gateway"])
        if gateway is None:
            if now - state["at"] > GONE_AFTER_S:
                return  # left in Redis by a gateway that has died
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
        """Drops gateways silent for `GONE_AFTER_S`. Call it only while Redis is up, else all would look silent."""
        for name in [name for name, each in self._gateways.items() if now - each.heard > GONE_AFTER_S]:
            gateway = self._gateways.pop(name)
            for request_id in list(gateway.rows):
                self._remove(gateway, request_id)
            self.version += 1

    def _foreign(self, gateway: _Gateway, state: QueueState) -> bool:
        """Is the state from another feed than the newest changes, or of an older version than the one held?"""
        if gateway.pending and gateway.pending[-1]["feed"] != state["feed"]:
            return True
        return gateway.feed == state["feed"] and state["version"] < gateway.version

    def _caught_up(self, gateway: _Gateway) -> bool:
        """Applies the kept changes that follow; True if none is left and the row count agrees."""
        while gateway.pending:
            changes = gateway.pending[0]
            if changes["feed"] != gateway.feed:
                # From an older feed than the state: drop it. From a newer one: wait for that feed's own whole state.
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
                gateway.version = UNKNOWN  # whatever the cause, only a whole state can correct it
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
        """Time of the least recent gateway message; None without gateways."""
        return min((gateway.at for gateway in self._gateways.values()), default=None)

    def kinds(self) -> list[tuple[Kind, int, float]]:
        """Tenant and class, number waiting, and the earliest latest-start time among them."""
        return [(kind, len(rows), float(rows[:1][0][0])) for kind, rows in sorted(self._kinds.items())]  # type: ignore[arg-type]

    def ids(self, kind: Kind | None = None, text: str = "") -> Sequence[str]:
        """Ids of waiting requests, most urgent first; of one class, or matching a text (see queue_filter)."""
        chosen = self._all if kind is None else self._kinds.get(kind, NONE)
        words = words_of(text)
        if not (words.anywhere or words.exactly):
            return Ids(chosen)
        texts, owner = self._texts, self._owner
        return [each for each in Ids(chosen) if words.match(owner[each].rows[each], texts[each])]

    def shown(self, request_id: str) -> Shown | None:
        """None if the request has left the queue."""
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
