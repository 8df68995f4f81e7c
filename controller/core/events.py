"""Events that drivers report to the scheduler, and actions that it returns.

Events come in batches with one `now` (monotonic seconds). The scheduler passes them to the dispatcher and the migrator,
which use the same events and actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from controller.core.decisions import Decision
from controller.core.kv_links import KvMoved, LinkState
from controller.core.types import InstanceSpec, Load, Part, Request

# What a failed call shows: a fault of the engine (another attempt may help), of its whole instance (which is down), of
# the request itself (no engine would take it), of its KV or the offer of it (an engine that needs none would take the
# request), or of the answer (another would be as bad).
AtFault = Literal["engine", "instance", "request", "kv", "answer"]

# ---- events -------------------------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    """A new request. `avoid`: instances that failed it before and are used only if there is no other."""

    request: Request
    avoid: frozenset[str] = frozenset()


class Cancelled(NamedTuple):
    """The client hung up or an operator cancelled. The request ends, whether it was queued or sent."""

    request_id: str


class Accepted(NamedTuple):
    """The engine answered with headers, so the request is in its queue."""

    request_id: str


class FirstToken(NamedTuple):
    """Prefill ended; from now on the request decodes.

    `assumed`: the token was not observed, so its time is not learned from.
    """

    request_id: str
    assumed: bool = False


class Progress(NamedTuple):
    """Output tokens delivered so far.

    Drivers report at most four times a second per request, because each event costs time.
    """

    request_id: str
    tokens: int


class AnswerBounded(NamedTuple):
    """The upper bound of an answer that still runs, predicted again from what it has produced: tokens of the whole
    answer."""

    request_id: str
    most_tokens: int


class Finished(NamedTuple):
    request_id: str
    output_tokens: int


class EngineFailed(NamedTuple):
    """A call of the request to this engine failed. The scheduler knows which stage it served and how far the request
    had got, and answers with Retry or Fail, or has another decode instance chosen.

    `reason`: of a failed KV transfer, for instance `no_room`. Drivers report what they saw and judge nothing by the
    stage: `at_fault` is `kv` also where no stage of KV was asked for, and an engine failed also where it is not needed
    any more. `connection`: it was lost after it had been made, as when an engine dies, or refused, so that the engine
    never saw the request.
    """

    request_id: str
    instance_id: str
    error: str = ""
    reason: str = "transfer_failed"
    at_fault: AtFault = "engine"
    connection: Literal["kept", "lost", "refused"] = "kept"


class Failed(NamedTuple):
    """An attempt of the request is over; the scheduler makes this event for the dispatcher and the migrator.

    Before the first token it is queued again, and its instance is avoided once. `hold_s`: it is not sent before.
    """

    request_id: str
    before_first_token: bool
    error: str = ""
    hold_s: float = 0.0


class PrefillSent(NamedTuple):
    """The request was sent to a prefill instance; the scheduler makes this event for the migrator.

    `paired`: prefill begins only when the decode stage is placed, since the engine takes both stages at once (SGLang's
    bootstrap). `prefill_s`: expected seconds of the prefill.
    """

    request: Request
    instance_id: str
    paired: bool = False
    prefill_s: float = 0.0


class PrefillEnding(NamedTuple):
    """The prompt is nearly computed.

    Its engine gives out KV during the prefill, so a decode instance may begin to pull now. PrefillDone follows.
    """

    request_id: str
    instance_id: str


class PrefillDone(NamedTuple):
    """The first token is out and the prefill instance has finished; it keeps `kv_tokens` tokens of KV for the decode
    stage.
    """

    request: Request
    instance_id: str
    kv_tokens: int


class AnsweredWhole(NamedTuple):
    """The first token was also the last, so no decode stage follows. The scheduler answers with AnswerThere."""

    request_id: str
    instance_id: str


class TransferStarted(NamedTuple):
    """The decode instance has reserved blocks.

    `moves`: KV is moving, as far as the engine can tell. If False, the engine reports TransferMoves once it has begun
    to pull.
    """

    request_id: str
    instance_id: str
    moves: bool = True


class TransferMoves(NamedTuple):
    """The prefill engine has answered the pull of the decode engine: KV moves as fast as it is computed."""

    request_id: str
    instance_id: str


class TransferDone(NamedTuple):
    """All KV is at the decode instance, where the sequence decodes now.

    `moved`: the transfer as the decode engine measured it; with a `reason` it failed, and that engine has computed the
    KV itself. `assumed`: the end of the transfer cannot be observed (an answer in one piece), so it says nothing about
    the link; the engine may measure it still. `released`: the decode engine has told the prefill engine, which has
    freed its copy.
    """

    request_id: str
    instance_id: str
    moved: KvMoved | None = None
    assumed: bool = False
    released: bool = False


class KvReleased(NamedTuple):
    """Answer to FreeKv: the prefill instance keeps no KV of the request any more.

    `known` False: it cannot be told (its engine frees KV once read, or when its lease ends) and must not be asked
    again.
    """

    request_id: str
    instance_id: str
    known: bool = True


class TransferFailed(NamedTuple):
    """The KV transfer failed, for instance `no_room`, `refused` or a broken link.

    The prefill instance still has its KV, unless TransferDone was assumed, or `reason` is `kv_lost` (it has not) or
    `transfer_failed` (unknown). After a TransferDone this event means that the decode instance lost the KV before it
    sent a byte of the answer.
    """

    request_id: str
    instance_id: str
    reason: str


class LinkSeen(NamedTuple):
    """State of the link from `source`, as the engine at `target` reports it.

    Bytes/s and seconds; None: not measured.
    """

    source: str
    target: str
    state: LinkState
    bandwidth_bytes_s: float | None = None
    latency_s: float | None = None


class Telemetry(NamedTuple):
    instance_id: str
    load: Load


class InstanceUp(NamedTuple):
    """An instance joined.

    `paired`: a prefill instance whose engine takes both stages of a request at once (SGLang's bootstrap). `learned`:
    what an earlier process of the same gateway learned of it (`controller.dispatch.learned`), checked by the driver; of
    an instance that is known already it changes nothing.
    """

    spec: InstanceSpec
    paired: bool = False
    learned: Mapping[str, Any] | None = None


class InstanceDraining(NamedTuple):
    """The instance finishes its requests and gets no new ones."""

    instance_id: str


class InstanceDown(NamedTuple):
    """The instance is gone. The driver also reports EngineFailed for each call that it was serving. `died`: nobody
    wanted that, as far as the driver knows."""

    instance_id: str
    died: bool = False


class Expected(NamedTuple):
    """An instance of the model is starting and will be up at `at` at the earliest; infinite: none is starting any more.

    Until then, requests wait that would otherwise be refused because no instance exists. `serving`: when those of which
    that is predicted are likely to serve, the first of them first.
    """

    model: str
    at: float
    serving: tuple[float, ...] = ()


class SharesChanged(NamedTuple):
    """This gateway's share (0..1] of an instance's budget; 1.0 if there is one gateway."""

    instance_id: str
    share: float


class FirstByteDelay(NamedTuple):
    """From the end of a prefill on this instance until the decode instance sends the client's first byte, at least, as
    the migrator expects it: `fixed_s` seconds and `s_a_token` for each token of the prompt."""

    instance_id: str
    fixed_s: float
    s_a_token: float


class DecodePace(NamedTuple):
    """What decoding takes after a prefill on this instance, by what the migrator knows of the decode instances: seconds
    of a step beside what runs there, and of the quickest step that is possible (`alone_s`). `crowd`: sequences that
    decode there for each instance that prefills."""

    instance_id: str
    token_s: float
    alone_s: float
    crowd: float


class Command(NamedTuple):
    """A command from the console for queued requests. The driver answers which were applied, gone or too late."""

    id: str
    actor: str
    kind: Literal["cancel", "reprioritise", "pause", "resume"]
    request_ids: tuple[str, ...]
    priority: int | None = None


class Orders(NamedTuple):
    """Orders of the coordinator of pruning. `expires_at`: on this driver's clock; `scavengers`: ids of requests to
    serve last, each with the instance whose queue it was for and the seconds by which its batch would be late."""

    sequence: int
    expires_at: float
    scavengers: dict[str, tuple[str, float]]


class OrderingChosen(NamedTuple):
    """Waiting requests are ordered by this one from now on, and ranked anew. `options`: its settings, a JSON object.
    `name` "": the ordering that the scheduler was built with."""

    name: str
    options: str = "{}"


class FramesLearned(NamedTuple):
    """What an earlier process of the same gateway knew of the order of a model's queue, `age_s` seconds ago
    (`Frames.state`), checked by the driver. It is not used if `ordering` is not the one in force, or has other settings
    now."""

    model: str
    ordering: str
    state: Mapping[str, Any]
    age_s: float


class ClockOffset(NamedTuple):
    """Seconds to add to this driver's clock for the clock that all gateways of the fleet share: what engines are told
    about urgency has to compare with what other gateways tell them."""

    seconds: float


class Woke(NamedTuple):
    """The requested wake-up time has come, possibly late and possibly without need."""


Event = (
    Arrived
    | Cancelled
    | Accepted
    | FirstToken
    | Progress
    | AnswerBounded
    | Finished
    | EngineFailed
    | Failed
    | PrefillSent
    | PrefillEnding
    | PrefillDone
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
    | SharesChanged
    | FirstByteDelay
    | DecodePace
    | Command
    | Orders
    | OrderingChosen
    | FramesLearned
    | ClockOffset
    | Woke
)

# ---- actions ------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """Send the request to the instance. `rank`: lower is more urgent; the backend translates it to the engine's scale.

    - `slack_s`: seconds left to the first-token deadline. Deadlines cross processes as remaining time, because clocks
      differ.
    - `prefill_s`: predicted seconds to the first token. A driver that will not see one (the answer is not streamed)
      reports FirstToken after that time. Otherwise the prompt would count as waiting until the answer ends.
    - `part`: which stages of the request this instance serves.
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
    """The waiting time has passed: answer `waiting_time_exceeded`."""

    request: Request
    decision: Decision


class Prune(NamedTuple):
    """The request is served last from now on, or as before again; it stays in the queue. Only records show it."""

    request: Request
    decision: Decision


class Retry(NamedTuple):
    """An engine failed the request before its client had a token: it is queued again. Nothing of it runs any more."""

    request: Request


class Fail(NamedTuple):
    """An engine failed the request, and it ends: its client has a token, or another attempt would not help.

    `rejected`: the engine refuses the request itself, so its client gets the engine's error.
    """

    request: Request
    rejected: bool = False


class AnswerThere(NamedTuple):
    """The prefill instance sends the whole answer. The one token is computed again in the client's format."""

    request: Request
    instance_id: str


class Unscheduled(NamedTuple):
    """A defect in a policy left the request neither queued nor sent: answer `internal_error`."""

    request: Request


class Abort(NamedTuple):
    """Cancel the request at the engine. `reason` is set for a decode stage; the request itself goes on."""

    request_id: str
    instance_id: str
    reason: str = ""


class Place(NamedTuple):
    """Run the decode stage of the request at `target`; its KV moves there from `source`.

    Answered by TransferStarted and TransferDone, or by TransferFailed. An Abort of the request at `target` rolls this
    back, even if its KV has arrived there; a driver then discards answers that are still in flight.
    """

    request: Request
    source: str
    target: str
    rank: int
    decision: Decision


class FreeKv(NamedTuple):
    """The prefill instance can free the KV of this request. Answered by KvReleased; sent again if no answer comes."""

    request_id: str
    instance_id: str


class LeftToLease(NamedTuple):
    """The prefill instance was asked `tries` times to free KV and never confirmed; the KV is freed when its lease
    ends.
    """

    request_id: str
    instance_id: str
    tries: int


class PrefillAgain(NamedTuple):
    """The KV was lost, cannot be transferred from its instance, or never arrives: the request is queued again.

    A prefill of it that still runs is aborted. `avoid`: instances that should not prefill it again. `counts`: whether
    this uses up one of the request's attempts. The first move away from an instance whose KV no decode instance can
    read does not count; otherwise the attempts could end before a compatible instance is tried.
    """

    request: Request
    decision: Decision
    avoid: frozenset[str] = frozenset()
    counts: bool = True


class GiveUp(NamedTuple):
    """The request ends with an error: no decode instance could take it, or (`prefilled`) its KV was lost too often."""

    request: Request
    decision: Decision
    prefilled: bool = False


Action = (
    Send
    | Refuse
    | Drop
    | Prune
    | Retry
    | Fail
    | AnswerThere
    | Unscheduled
    | Abort
    | Place
    | FreeKv
    | LeftToLease
    | PrefillAgain
    | GiveUp
)


class Reply(NamedTuple):
    """Actions to perform. `wake_at`: call again then at the latest; None: only when there are events."""

    actions: list[Action]
    wake_at: float | None
