"""What drivers tell the scheduler, and what it answers. Events come in batches with one `now` (monotonic seconds).

The scheduler hands them on to dispatcher and migrator, which are told and answer in the same words.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from controller.core.decisions import Decision
from controller.core.kv_links import KvMoved, LinkState
from controller.core.types import InstanceSpec, Load, Part, Request, Role

# ---- events -------------------------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    """`avoid`: instances that are asked only if there is no other (they failed it before)."""

    request: Request
    avoid: frozenset[str] = frozenset()


class Cancelled(NamedTuple):
    """The client hung up, or an operator cancelled. Queued or sent, the request is over."""

    request_id: str


class Accepted(NamedTuple):
    """The engine answered with headers: the request is in its queue."""

    request_id: str


class FirstToken(NamedTuple):
    """Prefill ended: the request decodes from here on. `assumed`: nobody saw it, so its pace teaches nothing."""

    request_id: str
    assumed: bool = False


class Progress(NamedTuple):
    """Output tokens delivered so far. Drivers report at most four a second per request: steps are many, events cost."""

    request_id: str
    tokens: int


class Finished(NamedTuple):
    request_id: str
    output_tokens: int


class Failed(NamedTuple):
    """The engine failed this request. Before the first token it is queued again (its instance excluded once)."""

    request_id: str
    before_first_token: bool
    error: str = ""


class PrefillSent(NamedTuple):
    """For the migrator, made by the scheduler: the request was sent to a prefill instance. `paired`: it begins when its
    decode stage is placed, both at once (SGLang's bootstrap). `prefill_s`: how long it is expected to take."""

    request: Request
    instance_id: str
    paired: bool = False
    prefill_s: float = 0.0


class PrefillEnding(NamedTuple):
    """Its prompt is nearly computed, at an engine that gives out KV while it computes: whoever is to decode it may
    begin to pull. PrefillDone follows."""

    request_id: str
    instance_id: str


class PrefillDone(NamedTuple):
    """Its first token is out and its work on the prefill instance over; `kv_tokens` of KV are kept there for it."""

    request: Request
    instance_id: str
    kv_tokens: int


class PrefillFailed(NamedTuple):
    """The prefill instance failed it while a decode instance works on it already. What becomes of it depends on whether
    its KV had arrived; where no decode instance was asked yet, or the prefill is all there is, it is `Failed`."""

    request_id: str
    instance_id: str
    error: str = ""


class AnsweredWhole(NamedTuple):
    """Its first token was its last: the prefill instance answers it alone, and no decode stage follows."""

    request_id: str
    instance_id: str


class TransferStarted(NamedTuple):
    """The decode instance has reserved its blocks. `moves`: the KV is on its way, as far as its engine tells; False:
    the engine says with TransferMoves when it has begun to pull."""

    request_id: str
    instance_id: str
    moves: bool = True


class TransferMoves(NamedTuple):
    """The prefill engine has answered the decode engine that pulls: the KV comes, as far as it is computed."""

    request_id: str
    instance_id: str


class TransferDone(NamedTuple):
    """The KV is at the decode instance, whole: the sequence decodes there. `moved`: as its engine measured it.
    `assumed`: nobody will see when it is (an answer in one piece), so it says nothing about the link. `released`: the
    engine that pulled has told the prefill engine so, which has freed its copy."""

    request_id: str
    instance_id: str
    moved: KvMoved | None = None
    assumed: bool = False
    released: bool = False


class KvReleased(NamedTuple):
    """Of a FreeKv: the prefill instance keeps nothing of it any more. `known` False: it cannot be told (its engine
    frees KV when it was read, or at the end of its lease), and is not to be asked again."""

    request_id: str
    instance_id: str
    known: bool = True


class TransferFailed(NamedTuple):
    """It did not get there: `no_room`, `refused`, a broken link. What is kept at the prefill instance is still there,
    unless its TransferDone was assumed, or `reason` is `kv_lost` (it is not) or `transfer_failed` (nobody says). After
    its TransferDone: the decode instance lost what it had, before a byte of the answer went out."""

    request_id: str
    instance_id: str
    reason: str


class LinkSeen(NamedTuple):
    """What the engine at `target` says of its link from `source`. Bytes a second and seconds; None: not measured."""

    source: str
    target: str
    state: LinkState
    bandwidth_bytes_s: float | None = None
    latency_s: float | None = None


class Telemetry(NamedTuple):
    instance_id: str
    load: Load


class InstanceUp(NamedTuple):
    """`paired`: of a prefill instance whose engine wants both stages of a request at once (SGLang's bootstrap)."""

    spec: InstanceSpec
    paired: bool = False


class InstanceDraining(NamedTuple):
    """Nothing new is sent there; what runs may finish."""

    instance_id: str


class InstanceDown(NamedTuple):
    """Gone. The driver reports Failed for each request it was serving."""

    instance_id: str


class Expected(NamedTuple):
    """An instance of the model is on its way, and may be there at `at` at the earliest; infinite: none is any more.

    Until it is there requests wait that would otherwise be refused for want of an instance.
    """

    model: str
    at: float


class RoleChanged(NamedTuple):
    instance_id: str
    role: Role


class SharesChanged(NamedTuple):
    """The part (0..1] of an instance's budget that is this gateway's; 1.0 with one gateway."""

    instance_id: str
    share: float


class Command(NamedTuple):
    """From the console: what to do with queued requests. Answered by the driver: applied, gone or too late."""

    id: str
    actor: str
    kind: Literal["cancel", "reprioritise", "pause", "resume"]
    request_ids: tuple[str, ...]
    priority: int | None = None


class Woke(NamedTuple):
    """The wake-up asked for has come (maybe late, maybe for nothing)."""


Event = (
    Arrived
    | Cancelled
    | Accepted
    | FirstToken
    | Progress
    | Finished
    | Failed
    | PrefillSent
    | PrefillEnding
    | PrefillDone
    | PrefillFailed
    | AnsweredWhole
    | TransferStarted
    | TransferMoves
    | TransferDone
    | KvReleased
    | TransferFailed
    | LinkSeen
    | Telemetry
    | InstanceUp
    | InstanceDraining
    | InstanceDown
    | Expected
    | RoleChanged
    | SharesChanged
    | Command
    | Woke
)

# ---- actions ------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send the request to the instance. `rank`: lower is more urgent, a plain int the adapter translates.

    `slack_s` is the time left to the first-token deadline; deadlines cross processes as remaining time. `prefill_s` is
    the predicted time to the first token there; a driver that will see no first token (a request that is not streamed)
    reports FirstToken after that time, or the prompt would count as waiting until the answer ends. `part`: what of the
    request the instance is asked for.
    """

    request: Request
    instance_id: str
    rank: int
    slack_s: float
    decision: Decision
    prefill_s: float = 0.0
    part: Part = Part.WHOLE


class Refuse(NamedTuple):
    """Answer at once with an error; `code` is one of the data path's error codes."""

    request: Request
    code: str
    retry_after_s: float
    decision: Decision


class Drop(NamedTuple):
    """waiting_time ran out: answer `waiting_time_exceeded`."""

    request: Request
    decision: Decision


class Unscheduled(NamedTuple):
    """A defect in a policy left the request nowhere: answer `internal_error`."""

    request: Request


class Abort(NamedTuple):
    """Cancel at the engine what was sent there. `reason`: of a decode stage, why; the request itself goes on."""

    request_id: str
    instance_id: str
    reason: str = ""


class Place(NamedTuple):
    """The decode stage of the request runs at `target`; its KV goes there from `source`.

    Answered by TransferStarted and TransferDone, or by TransferFailed. An Abort of the request at `target` undoes it,
    even if its KV has landed there; a driver then drops answers that are still on their way.
    """

    request: Request
    source: str
    target: str
    rank: int
    decision: Decision


class FreeKv(NamedTuple):
    """What the prefill instance keeps for the request is not needed any more. Answered by KvReleased; asked again where
    no answer comes."""

    request_id: str
    instance_id: str


class LeftToLease(NamedTuple):
    """The prefill instance was asked `tries` times to free KV and never said that it has: its lease will."""

    request_id: str
    instance_id: str
    tries: int


class PrefillAgain(NamedTuple):
    """Its KV was lost, cannot leave where it is, or never comes: the request is queued again, and a prefill of it that
    still runs is aborted. `avoid`: where not to prefill it again. `counts`: as one of the attempts that a request has;
    the first time that it leaves an instance whose KV nobody reads does not, or it would be over before the one that
    fits was asked."""

    request: Request
    decision: Decision
    avoid: frozenset[str] = frozenset()
    counts: bool = True


class GiveUp(NamedTuple):
    """The request ends with an error: no decode instance could take it, or (`prefilled`) its KV was lost too often."""

    request: Request
    decision: Decision
    prefilled: bool = False


Action = Send | Refuse | Drop | Unscheduled | Abort | Place | FreeKv | LeftToLease | PrefillAgain | GiveUp


class Reply(NamedTuple):
    """`wake_at`: ask again then, at the latest; None: only on an event."""

    actions: list[Action]
    wake_at: float | None
