"""Names in Redis and shapes of what travels there. Only what can be rebuilt lives in Redis."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

# ---- keys (plain Redis, JSON values) ---------------------------------------------------------------------------------
TELEMETRY_KEY = "slackline:telemetry:{instance}"  # TelemetryMessage, TTL three periods
FLEET_KEY = "slackline:fleet:{gateway}"  # FleetMessage, TTL three periods
GATEWAYS_KEY = "slackline:gateways"  # set of gateway ids seen lately
QUEUE_KEY = "slackline:queue:{gateway}"  # QueueState, TTL 10 s; written when somebody who watches asks
QUEUE_ASKED_KEY = "slackline:queue-asked"  # how often a whole state was asked for, of every gateway
LEASE_KEY = "slackline:lease:{what}"  # telemetry leader: SET NX PX
WATCHED_KEY = "slackline:watched:{topic}"  # refreshed by consumers while a browser watches, TTL 10 s
CONFIG_CHANNEL = "slackline:config"  # pub/sub: the new config version; only makes polling faster
HEARTBEAT_KEY = "slackline:heartbeat:{process}"  # epoch seconds when worker or beat last acted, TTL 30 s
FAILING_KEY = "slackline:failing:{task}"  # hash: `count` of failures in a row and the last `error`, TTL 60 s
COMMAND_CHANNEL = "slackline:command:{gateway}"  # pub/sub: CommandMessage
COMMAND_ANSWER_KEY = "slackline:command-answer:{command}"  # list, BLPOP by the asker, TTL 30 s

# ---- Channels groups (live pages) ------------------------------------------------------------------------------------
LIVE_OVERVIEW = "live.overview"
LIVE_QUEUE = "live.queue"
LIVE_DECISIONS = "live.decisions"
LIVE_EXPERIMENTS = "live.experiments"
LIVE_TYPE = "live.message"  # Channels handler name: live_message


class ClassWindow(TypedDict):
    """Attainment of one (tenant, class) over a recent window, as a gateway measured it."""

    tenant: str
    slo_class: str
    window_s: float  # the span the counts cover: the window, or less where it was cut to its newest requests
    finished: int  # misses included, cancellations not
    attained: int
    ttft_met: int
    tpot_met: int
    refused: int
    failed: int
    cancelled: int
    goodput_tokens: int
    target: float
    queued: int
    oldest_slack_s: float | None  # smallest time left to a TTFT deadline in the queue
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    miss_reason: str  # the commonest cause of misses in the window, "" if none
    sampled: NotRequired[int]  # the newest of `finished`, which the latencies are read from
    first_tokens: NotRequired[int]  # those of them whose first token was seen: TTFT is theirs alone
    in_one_piece: NotRequired[int]  # those that were served without streaming: nobody sees their first token


class DecisionCount(TypedDict):
    """What a gateway's dispatcher decided about requests of one (tenant, class) since the gateway began."""

    tenant: str
    slo_class: str
    kind: str
    reason: str
    count: int


class InstanceMessage(TypedDict):
    id: str
    model: str
    role: str
    state: str
    running: int
    waiting: int
    waiting_tokens: int
    kv_usage: float
    slots: int
    utilisation: float
    telemetry_age_s: float | None
    sent_total: int


class StageTraffic(TypedDict):
    """What prefill or decode saw of a model whose stages run apart; the wait is over the TTFT or the TPOT target."""

    arrival_rate: float  # prompts for prefill; prefilled requests for decode; each per second over the last 10 s
    service_rate: float  # those it finished
    queued: int
    wait_over_slo: float


class LinkMessage(TypedDict):
    """A link as a gateway believes it to be. `closed`: transfers on it failed, so it is left alone for a while."""

    source: str
    target: str
    state: str
    closed: bool
    bandwidth_bytes_s: float | None
    latency_s: float | None


class ModelTraffic(TypedDict):
    """What a gateway saw of one served model; models without traffic or queue are left out."""

    arrival_rate: float  # requests/s over the last 10 s
    service_rate: float  # requests/s finished over the last 10 s
    queued: int
    wait_over_slo: float  # largest wait / TTFT target among queued
    migrating: int  # prefilled, and without a decode instance yet
    migrate_wait_over_slo: float  # largest wait since the first token / TPOT target among those
    stages: NotRequired[dict[str, StageTraffic]]  # by role, where prefill and decode run apart


class FleetMessage(TypedDict):
    """The gateway's view, for scaler and pages. `at` is wall time (epoch seconds): readers check its age."""

    gateway: str
    at: float
    seq: int
    period_s: float
    instances: list[InstanceMessage]
    queued: int
    queued_tokens: int
    in_flight: int
    arrival_rate: float  # requests/s over the last 10 s
    service_rate: float  # requests/s finished over the last 10 s
    wait_over_slo: float  # largest wait / TTFT target among queued
    models: dict[str, ModelTraffic]  # the four above by model: what the scaler of a model reads
    classes: list[ClassWindow]
    tenants: dict[str, int]  # requests let in and not ended, of tenants with any: what `max_concurrency` bounds
    policy: str
    links: NotRequired[list[LinkMessage]]  # between prefill and decode instances
    decisions: NotRequired[list[DecisionCount]]
    # What becomes of a request, by model: `up`, an engine takes it; `undecoded`, one prefills it and none decodes it;
    # `coming`, it waits for one; `none`, it is refused.
    capacity: NotRequired[dict[str, str]]


class TelemetryMessage(TypedDict):
    instance: str
    at: float
    load: dict[str, Any]


class QueueRow(TypedDict):
    """One waiting request. Nothing in it changes with time alone. Instants are epoch seconds once published."""

    id: str
    tenant: str
    slo_class: str
    model: str
    prompt_tokens: int
    output_tokens: int  # expected
    ttft_s: float  # the target
    arrived_at: float
    due_at: float  # to be started by, if its first token shall be in time
    gives_up_at: NotRequired[float]  # its waiting time is over then; left out by gateways of an older release
    order: list[float]  # place in its model's queue: rows sorted by this, then arrival, then id
    hopeless: bool
    paused: bool  # held back by an operator
    priority: int | None


class QueueState(TypedDict):
    """The whole queue of one gateway, as of `version` of `feed`; written when a reader asks."""

    gateway: str
    feed: str  # a new one each time the gateway starts to publish: versions of two feeds do not compare
    version: int
    asked: int  # the newest request for a whole state that this one answers
    at: float
    rates: dict[str, float]  # requests/s finished by model, over the last 10 s
    rows: list[QueueRow]


class QueueChanges(TypedDict):
    """What makes `base` of a feed its `version`: rows new or changed, and ids that wait no more.

    Sent several times a second, also when nothing changed: a reader whose version is not `base` has lost one, and
    asks for the whole state. `total` is how many wait then, to check the result by.
    """

    gateway: str
    feed: str
    base: int
    version: int
    at: float
    rates: dict[str, float]
    total: int
    put: list[QueueRow]
    gone: list[str]


QUEUE_ROWS_SHOWN = 200  # of the control API, at once
QUEUE_PRESSURE_ROWS = 200  # most urgent rows of which the longest wait is told to the scaler


class DecisionMessage(TypedDict):
    """One decision as pages list it. Made by `controller.wording.sentences.message_of` and by nobody else."""

    id: str
    at: float  # epoch seconds
    sentence: str
    figures_text: str  # its most telling figures, less those that the sentence has


class LiveMessage(TypedDict):
    """What a browser gets: a topic, a sequence number (a gap means refetch), the age of the data, the data."""

    topic: str
    seq: int
    at: float
    data: dict[str, Any]


class CommandMessage(TypedDict):
    id: str
    actor: str
    kind: str  # cancel | reprioritise | pause | resume
    request_ids: list[str]
    priority: int | None
    expires_at: float  # epoch seconds


class CommandAnswer(TypedDict):
    command: str
    gateway: str
    applied: list[str]
    gone: list[str]
    too_late: list[str]


class ExperimentMessage(TypedDict):
    """How far an experiment is. `progress` is a share 0..1, `step` what runs at the moment."""

    slug: str
    state: str
    progress: float
    step: str
