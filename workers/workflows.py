"""Workflows with one deadline, in Redis: every gateway sees the same, on Redis' own clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from controller.core.types import WorkflowCancellation
from controller.predict.pattern_graphs import MOST_NODES, Call, kind_of_tool
from workers.live import Command, Dialogue
from workers.workflow_script import RUN

WORKFLOWS_KEY = "slackline:workflows:{tenant}"  # sorted set: workflow ids by the epoch second at which they are due
# Sorted set of a tenant and a workflow: the numbers of its newest steps by the digest of their names.
NAMED_KEY = "slackline:workflows::named:{tenant}|{workflow}"
MEMORY_KEY = "slackline:workflows::memory"  # hash: since when Redis remembers, and `before`: that it had lost a memory
CANCELLED_KEY = "slackline:workflows::cancelled"  # stream: tenant, workflow and `by` of the newest cancellations
KEPT_S = 3_600.0  # after it was due, as long as there is room: until then a late step is known to be late
MOST_OPEN = 10_000  # of one tenant: some 10 MB with five stages each, and 20 more with 35 calls each
# Of what gateways ask for in one script. Measured on Redis 6.2: 64 requests hold it up for 0.5 ms (1.2 ms if they ask
# for 35 calls each), 64 workflows that begin, each with five stages, for 2 ms.
AT_ONCE = 64
MOST_NAMED = 128  # of one workflow
MOST_TOOLS = 64  # of one workflow: each some 200 bytes; later ones are not recorded, and drawn nowhere
MOST_TOOL_BYTES = 16 << 10  # of these together: one with 32 parents of 120 characters each may take as much
CANCELLATIONS_KEPT = 10_000  # gateways read them four times a second
LISTED = 200  # of each tenant's that are not due yet, the soonest first

BY_TENANT, BY_OPERATOR = "tenant", "operator"


class TooManyWorkflows(Exception):
    """The tenant has `MOST_OPEN` workflows that are not due yet."""


class WrongParent(Exception):
    """`cycle`: the parent began after the step that names it first did, so that it may depend on that one; else the
    workflow has no step of this name, or it is not among its newest `MOST_NAMED`."""

    def __init__(self, parent: str, *, cycle: bool) -> None:
        super().__init__(parent)
        self.parent, self.cycle = parent, cycle


class OtherWorkflow(Exception):
    """The tenant has a workflow of this id, with another deadline or other stages, or a cancelled one."""


class StepExists(Exception):
    """A request of the workflow has the key of this tool step, or a tool step that of this request."""


class WorkflowCancelled(Exception):
    """`by`: BY_TENANT or BY_OPERATOR."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.by = by


class MemoryLost(Exception):
    """Redis has forgotten what it knew, and did nothing of what it was asked."""


@dataclass(slots=True)
class RedisMemory:
    """`since`: the time from which Redis remembers, on its own clock, as this process saw it last; "": never. `losses`:
    how often this process saw another one than before."""

    since: str = ""
    losses: int = 0


class Stage(NamedTuple):
    """A stage of a workflow. `share`: of the time, relative to the others'."""

    name: str
    share: float


class ToolStep(NamedTuple):
    """A step that the client's own tool did. Epoch seconds on Redis' clock. `key`: by which others name it."""

    key: str
    name: str
    began: float
    ended: float
    parents: tuple[str, ...] | None


class ReportTool(NamedTuple):
    """A tool step that has ended, `ago_s` before now; it took `took_s`. Reported again it changes nothing."""

    tenant: str
    workflow: str
    key: str
    name: str
    took_s: float
    ago_s: float
    parents: tuple[str, ...] | None

    def arguments(self) -> list[str]:
        told = "" if self.parents is None else "1"
        own, *parents = map(_digest, (self.key, *(self.parents or ())))
        what = orjson.dumps((self.key, self.name, self.parents)).decode()
        times = (f"{self.took_s:.6f}", f"{self.ago_s:.6f}")
        call = f"{kind_of_tool(self.name)} 0"
        most = (str(MOST_TOOLS), str(MOST_TOOL_BYTES))
        return ["tool", self.workflow, call, str(MOST_NODES), own, told, *times, what, *most, *parents]

    def found(self, raw: Any) -> int | None:
        """Its number; None: the workflow has no deadline, has not begun, or is forgotten."""
        if isinstance(raw, bytes):
            raise _refusal(raw, self.parents)
        return None if raw is None else int(raw)


class StepOfWorkflow(NamedTuple):
    """A request of a workflow. `deadline_s`: of the whole workflow, if the request names one. `kind` and
    `input_tokens` are kept for later ones; `wanted`: whether it asks for those of the workflow's calls so far. `name`:
    by which later ones call it their parent. `parents`: the names of its own; None: it does not tell."""

    tenant: str
    workflow: str
    deadline_s: float | None
    kind: int = 0
    input_tokens: int = 0
    wanted: bool = False
    name: str = ""
    parents: tuple[str, ...] | None = None

    def arguments(self) -> list[str]:
        deadline = "" if self.deadline_s is None else f"{self.deadline_s:.6f}"
        call = f"{self.kind} {self.input_tokens}"
        told, names = "" if self.parents is None else "1", map(_digest, (self.name, *(self.parents or ())))
        wanted, (own, *parents) = "1" if self.wanted else "", names
        return ["join", self.workflow, deadline, call, wanted, str(MOST_NODES), own, told, *parents]

    def found(self, raw: Any) -> JoinedWorkflow | None:
        if raw is None:
            return None
        if isinstance(raw, bytes):
            raise _refusal(raw, self.parents)
        return JoinedWorkflow(
            float(raw[0]), bool(raw[1]), _stages(raw[2]), raw[3], _calls(raw[4]), tuple(map(tool_of, raw[5])),
            float(raw[6]) if raw[6] else None, raw[7],
        )  # fmt: skip


class MissedStep(NamedTuple):
    """A request that was served `ago_s` before now without its workflow, since Redis did not answer. `asked`: the run
    of its gateway that asked for it, 0 if none did. Redis may have taken it for a call, or may get the question yet."""

    step: StepOfWorkflow
    asked: int
    ago_s: float

    @property
    def tenant(self) -> str:
        return self.step.tenant

    def arguments(self) -> list[str]:
        _, workflow, deadline, call, _, most, own, *_ = self.step.arguments()
        return ["miss", workflow, deadline, call, most, own, str(self.asked), f"{self.ago_s:.6f}"]

    def found(self, raw: Any) -> None:
        return None


class JoinedWorkflow(NamedTuple):
    """`left_s`: until it is due, negative if it is late. `began`: with this request. `number`: of this request among
    its calls, from 1. `calls`: the first MOST_NODES of them, if asked for, without those that failed; epoch seconds.
    `tools`: reported since the request before. `deadline_s`: from its beginning to when it is due; None: an older
    release began it. `before`: earlier requests, without those known to have failed or to have got a kept answer."""

    left_s: float
    began: bool
    stages: tuple[Stage, ...] = ()
    number: int = 0
    calls: tuple[Call, ...] = ()
    tools: tuple[ToolStep, ...] = ()
    deadline_s: float | None = None
    before: int = 0


class WorkflowState(NamedTuple):
    """What Redis knows of a workflow. Epoch seconds on Redis' clock, `now` included; `began_at` None: a gateway of an
    older release began it. `seen`: requests that were let in; `answered` and `failed` of them have ended, the last of
    the answers at `ended_at`. `cancelled_by`: BY_TENANT, BY_OPERATOR or "". `new`: begun or cancelled by this call."""

    now: float
    due_at: float
    began_at: float | None
    deadline_s: float | None
    stages: tuple[Stage, ...]
    seen: int
    answered: int
    failed: int
    output_tokens: int
    ended_at: float | None
    cancelled_at: float | None
    cancelled_by: str
    new: bool = False
    tools: tuple[ToolStep, ...] = ()

    @property
    def left_s(self) -> float:
        """Negative: it is late."""
        return self.due_at - self.now

    @property
    def state(self) -> str:
        """open, late or cancelled."""
        return "cancelled" if self.cancelled_by else "late" if self.left_s <= 0 else "open"

    @property
    def running(self) -> int:
        """Requests whose end no gateway has told yet."""
        return max(0, self.seen - self.answered - self.failed)

    @property
    def given_up(self) -> bool:
        """It was cancelled before it was due; cancelled later, it keeps the result that it had then."""
        return bool(self.cancelled_by) and (self.cancelled_at is None or self.cancelled_at < self.due_at)

    @property
    def in_time(self) -> bool:
        """All or nothing: so far, every request that has ended was answered, and by the deadline. A workflow that is
        late is not in time while a request of it runs."""
        if self.given_up or self.failed or (self.ended_at is not None and self.ended_at > self.due_at):
            return False
        return self.left_s > 0 or 0 < self.seen == self.answered

    def cancellation(self, tenant: str, workflow: str, now: float) -> WorkflowCancellation | None:
        """What is stored of it, in epoch seconds of a clock on which it is `now`. None: it was not given up."""
        if not self.given_up or self.cancelled_at is None:
            return None
        began_at = self.cancelled_at if self.began_at is None else self.began_at
        times = (at + now - self.now for at in (began_at, self.due_at, self.cancelled_at))
        return WorkflowCancellation(tenant, workflow, self.cancelled_by, *times)


class OpenWorkflow(NamedTuple):
    """Begins a workflow before its first request. Sent again unchanged it changes nothing."""

    tenant: str
    workflow: str
    deadline_s: float
    stages: tuple[Stage, ...] = ()

    def arguments(self) -> list[str]:
        stages = orjson.dumps([tuple(stage) for stage in self.stages]).decode() if self.stages else ""
        return ["open", self.workflow, f"{self.deadline_s:.6f}", stages]

    def found(self, raw: Any) -> WorkflowState:
        if isinstance(raw, bytes):
            raise TooManyWorkflows if raw == b"full" else OtherWorkflow
        return _state(raw)


class RestoreWorkflow(NamedTuple):
    """What a gateway knows of a workflow that began `ago_s` before now, for a Redis that has forgotten it."""

    tenant: str
    workflow: str
    deadline_s: float
    stages: tuple[Stage, ...]
    ago_s: float

    def arguments(self) -> list[str]:
        _, *told = OpenWorkflow(self.tenant, self.workflow, self.deadline_s, self.stages).arguments()
        return ["restore", *told, f"{self.ago_s:.6f}"]

    def found(self, raw: Any) -> None:
        return None


class ReadWorkflow(NamedTuple):
    tenant: str
    workflow: str

    def arguments(self) -> list[str]:
        return ["read", self.workflow]

    def found(self, raw: Any) -> WorkflowState | None:
        return None if raw is None else _state(raw)


class CancelWorkflow(NamedTuple):
    """For good: later requests of it are refused. Cancelling again changes nothing. Gateways end its open requests
    (`cancellations`)."""

    tenant: str
    workflow: str
    by: str

    def arguments(self) -> list[str]:
        return ["cancel", self.workflow, self.by, self.tenant]

    def found(self, raw: Any) -> WorkflowState | None:
        return None if raw is None else _state(raw)


class EndedCall(NamedTuple):
    """`number`: of the call, as its workflow was joined. `output_tokens` -1: it failed, or was computed before."""

    number: int
    output_tokens: int
    ago_s: float


class CountRequests(NamedTuple):
    """Requests that a gateway has let in, and that ended there. `ago_s`: since the last answer, None without one.
    `aside`: of the calls, those that were not let in, failed, or got a kept answer. `teller`, `telling`: who tells, and
    the number of what it tells, which rises: what is told again, because no answer came, counts once. "": it is told
    once."""

    tenant: str
    workflow: str
    seen: int
    answered: int
    failed: int
    output_tokens: int
    ago_s: float | None
    ends: tuple[EndedCall, ...] = ()
    aside: int = 0
    teller: str = ""
    telling: int = 0

    def arguments(self) -> list[str]:
        counts = map(str, (self.seen, self.answered, self.failed, self.output_tokens, self.aside))
        ends = ",".join(f"{each.number} {each.output_tokens} {max(0.0, each.ago_s):.3f}" for each in self.ends)
        ago = "" if self.ago_s is None else f"{self.ago_s:.6f}"
        return ["count", self.workflow, *counts, ago, ends, self.teller, str(self.telling)]

    def found(self, raw: Any) -> None:
        return None


Order = (
    StepOfWorkflow | MissedStep | ReportTool | OpenWorkflow | RestoreWorkflow | ReadWorkflow | CancelWorkflow
    | CountRequests
)  # fmt: skip


def run_orders(
    orders: Sequence[Order], asker: str = "", run: int = 0, *, missed: int = 0, memory: RedisMemory | None = None
) -> Dialogue[list[Any]]:
    """What Redis answers to each, for its `found`, all as one atomic step. `run`: its number among those of `asker`,
    which rises. `missed`: the run that told of these missed steps first, so that they count once; from then on earlier
    ones join nothing, however late Redis gets them. `memory`: what this process knows of Redis', brought up to date.
    Raises MemoryLost if that has changed."""
    told: list[str] = [str(int(KEPT_S)), str(MOST_OPEN), CANCELLED_KEY, str(CANCELLATIONS_KEPT), str(MOST_NAMED)]
    told += [asker, str(run), str(missed), "" if memory is None else memory.since]
    for order in orders:
        act, *arguments = order.arguments()
        told += [act, str(len(arguments)), *arguments]
    keys = [WORKFLOWS_KEY.format(tenant=order.tenant) for order in orders]
    command: Command = ("EVAL", RUN, len(keys), *keys, *told)
    *found, since = yield command
    if memory is not None:
        known, memory.since = memory.since, since.decode()
        if known not in ("", memory.since):
            memory.losses += 1
            raise MemoryLost
    return found


def remembers_since() -> Dialogue[str]:
    """As `RedisMemory` has it; "": nobody has asked it about workflows yet."""
    found = yield ("HGET", MEMORY_KEY, "since")
    return "" if found is None else found.decode()


def read_workflow(tenant: str, workflow: str) -> Dialogue[WorkflowState | None]:
    """None: it has no deadline, has not begun, or is forgotten."""
    order = ReadWorkflow(tenant, workflow)
    return order.found((yield from run_orders([order]))[0])


def read_workflows(names: Sequence[tuple[str, str]]) -> Dialogue[list[WorkflowState | None]]:
    """The same of several, each (tenant, workflow)."""
    orders, found = [ReadWorkflow(*name) for name in names], []
    for start in range(0, len(orders), AT_ONCE):
        found += yield from run_orders(orders[start : start + AT_ONCE])
    return [order.found(raw) for order, raw in zip(orders, found, strict=True)]


def cancel_workflow(tenant: str, workflow: str, by: str) -> Dialogue[WorkflowState | None]:
    """None: as above, and nothing was cancelled."""
    order = CancelWorkflow(tenant, workflow, by)
    return order.found((yield from run_orders([order]))[0])


def open_workflows(tenants: Sequence[str]) -> Dialogue[list[tuple[str, str]]]:
    """(tenant, workflow) of those that are not due yet, at most `LISTED` of each tenant, the soonest due first."""
    told = yield ("TIME",)
    now, found = f"({told[0] + told[1] / 1e6:.6f}", []
    for tenant in tenants:
        key = WORKFLOWS_KEY.format(tenant=tenant)
        names = yield ("ZRANGEBYSCORE", key, now, "+inf", "LIMIT", 0, LISTED)
        found += [(tenant, name.decode()) for name in names]
    return found


class Cancellation(NamedTuple):
    id: str  # of the stream: later ones are larger
    tenant: str
    workflow: str
    by: str


def cancellations(after: str) -> Dialogue[list[Cancellation]]:
    """Those after the one with this id, oldest first."""
    found = yield ("XRANGE", CANCELLED_KEY, f"({after}", "+")
    return [_cancellation(name, fields) for name, fields in found]


def _cancellation(name: bytes, fields: dict[bytes, bytes]) -> Cancellation:
    told = {key.decode(): value.decode() for key, value in fields.items()}
    return Cancellation(name.decode(), told["tenant"], told["workflow"], told["by"])


def _stages(raw: bytes) -> tuple[Stage, ...]:
    return tuple(Stage(*each) for each in orjson.loads(raw)) if raw else ()


def _refusal(raw: bytes, parents: tuple[str, ...] | None) -> Exception:
    word, _, index = raw.decode().partition(" ")
    if index:
        return WrongParent((parents or ())[int(index) - 1], cycle=word == "cycle")
    if word == "exists":
        return StepExists()
    return TooManyWorkflows() if word == "full" else WorkflowCancelled(word)


def tool_of(raw: bytes) -> ToolStep:
    began, ended, what = raw.split(b" ", 2)
    key, name, parents = orjson.loads(what)
    return ToolStep(key, name, float(began), float(ended), None if parents is None else tuple(parents))


def _calls(raw: list[Any]) -> tuple[Call, ...]:
    """`raw`: names and values, of each call how it began and how it ended."""
    known, found = dict(zip(raw[::2], raw[1::2], strict=True)), []
    for number in range(1, MOST_NODES + 1):
        begun, ended = known.get(b"c%d" % number), known.get(b"e%d" % number)
        if begun is None:
            continue
        kind, input_tokens, began = begun.split()
        output_tokens, at = (0, None) if ended is None else ended.split()
        if int(output_tokens) >= 0:
            at = None if at is None else float(at)
            told = known.get(b"p%d" % number)
            parents = None if told is None else tuple(map(int, told.split(b",") if told else ()))
            figures = (float(began), at, int(input_tokens), int(output_tokens))
            found.append(Call(int(kind), *figures, number, parents))
    return tuple(found)


def _digest(name: str) -> str:
    return blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _state(raw: list[Any]) -> WorkflowState:
    now, due, new, flat = raw
    known: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))

    def seconds(name: bytes) -> float | None:
        return float(known[name]) if name in known else None

    def number(name: bytes) -> int:
        return int(known.get(name, 0))

    due_at = seconds(b"due")  # the score of a cancelled one is when it was cancelled
    return WorkflowState(
        now=float(now),
        due_at=float(due) if due_at is None else due_at,
        began_at=seconds(b"began"),
        deadline_s=seconds(b"deadline"),
        stages=_stages(known.get(b"stages", b"")),
        seen=number(b"seen"),
        answered=number(b"answered"),
        failed=number(b"failed"),
        output_tokens=number(b"tokens"),
        ended_at=seconds(b"ended"),
        cancelled_at=seconds(b"cancelled"),
        cancelled_by=known.get(b"by", b"").decode(),
        new=bool(new),
        tools=tuple(tool_of(known[b"t%d" % place]) for place in range(1, number(b"tools") + 1)),
    )
