"""Redis keys, and the shapes of the messages under them. Redis holds only what can be rebuilt."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

# ---- keys (plain Redis, JSON values) ---------------------------------------------------------------------------------
TELEMETRY_KEY = "slackline:telemetry:{instance}"  # TelemetryMessage, TTL three periods
FLEET_KEY = "slackline:fleet:{gateway}"  # FleetMessage, TTL three periods
GATEWAYS_KEY = "slackline:gateways"  # set of gateway ids seen lately
QUEUE_KEY = "slackline:queue:{gateway}"  # QueueState, TTL 10 s; written when a reader asks for it
QUEUE_ASKED_KEY = "slackline:queue-asked"  # counts requests for a whole state, for all gateways
LEASE_KEY = "slackline:lease:{what}"  # telemetry leader: SET NX PX
WATCHED_KEY = "slackline:watched:{topic}"  # refreshed by consumers while a browser watches, TTL 10 s
CONFIG_CHANNEL = "slackline:config"  # pub/sub: the new config version; only makes polling faster
SIGN_IN_KEY = "slackline:sign-in:{what}:{who}"  # failed attempts, TTL 15 minutes; `known`: "1", TTL 30 days
HEARTBEAT_KEY = "slackline:heartbeat:{process}"  # epoch seconds when worker or beat last acted, TTL 30 s
FAILING_KEY = "slackline:failing:{task}"  # hash: `count` of failures in a row and the last `error`, TTL 60 s
FAILING_POLICIES_KEY = "slackline:failing-policies"  # FailingPolicies, TTL 60 s
COMMAND_CHANNEL = "slackline:command:{gateway}"  # pub/sub: CommandMessage
COMMAND_ANSWER_KEY = "slackline:command-answer:{command}"  # list, BLPOP by the asker, TTL 30 s
FLOW_POLICY_KEY = "slackline:flow-policy"  # the stored flow policy; absent: transfer daemons follow their FLOW_POLICY
PRUNING_REPORT_KEY = "slackline:pruning:report:{gateway}"  # QueueReport as JSON, TTL three periods
PRUNING_WAKE_KEY = "slackline:pruning:wake"  # list of at most one entry: a queue changed; BLPOP by the coordinator
PRUNING_SEQUENCE_KEY = "slackline:pruning:sequence"  # counts the coordinator's orders
PRUNING_ORDERS_KEY = "slackline:pruning:orders"  # PruningOrders as JSON, until they expire
PRUNING_UNTOLD_KEY = "slackline:pruning:untold"  # what the coordinator has not told the audit yet, as JSON, TTL an hour
PRUNING_CHANNEL = "slackline:pruning:orders"  # pub/sub: the same, to all gateways
HOST_FLOWS_KEY = "slackline:host-flows"  # hash: HostFlows by host, each second from its transfer daemon, TTL an hour

# ---- Channels groups (live pages) ------------------------------------------------------------------------------------
LIVE_OVERVIEW = "live.overview"
LIVE_QUEUE = "live.queue"
LIVE_DECISIONS = "live.decisions"
LIVE_EXPERIMENTS = "live.experiments"
LIVE_TYPE = "live.message"  # Channels handler name: live_message


class FailingPolicy(TypedDict):
    """A scaling policy whose ticks fail. `name`: its model and role; `error`: the type of the newest exception."""

    name: str
    count: int  # failures in a row
    error: str


FailingPolicies = dict[str, FailingPolicy]  # by the policy's id


class ClassWindow(TypedDict):
    """Attainment of one (tenant, class) over a recent window, as a gateway measured it."""

    tenant: str
    slo_class: str
    window_s: float  # seconds that the counts cover: less than the window if it was cut to its newest requests
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
    miss_reason: str  # the most frequent cause of misses in the window, "" if none
    sampled: NotRequired[int]  # size of the sample (newest of `finished`) for the latencies
    first_tokens: NotRequired[int]  # of the sample, those with a measured first token, which the TTFT is based on
    in_one_piece: NotRequired[int]  # of the sample, those not streamed, whose first token cannot be measured


class DecisionCount(TypedDict):
    """How many decisions of one kind a gateway made about requests of one (tenant, class) since it started."""

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
    kept_kv: NotRequired[int]  # prompts computed there whose KV is still to be pulled or freed
    # It alone keeps targets of some recent request, or it drains and none that serves keeps them.
    needed: NotRequired[bool]
    speed: NotRequired[float]  # reference requests/s of its stage when full; 0: not known


class StageTraffic(TypedDict):
    """Traffic of one stage (prefill or decode) of a disaggregated model, as a gateway saw it."""

    arrival_rate: float  # prompts/s (prefill) or prefilled requests/s (decode), over the last 10 s
    service_rate: float  # requests/s that finished the stage
    queued: int
    wait_over_slo: float


class LinkMessage(TypedDict):
    """A link as a gateway sees it. `closed`: transfers failed on it, so the migrator avoids it for a while."""

    source: str
    target: str
    state: str
    closed: bool
    bandwidth_bytes_s: float | None
    latency_s: float | None


class ModelTraffic(TypedDict):
    """Traffic of one served model, as a gateway saw it; models without traffic and without a queue are left out."""

    arrival_rate: float  # requests/s over the last 10 s
    service_rate: float  # requests/s finished over the last 10 s
    queued: int
    wait_over_slo: float  # largest wait / TTFT target among queued
    migrating: int  # prefilled requests that wait for a decode instance
    migrate_wait_over_slo: float  # largest wait since the prefill / what that left of the TTFT target, among them
    stages: NotRequired[dict[str, StageTraffic]]  # by role, if the model is disaggregated


class LearnedMessage(TypedDict):
    """Which version of what is learned from records a gateway uses. `version` None: none, with `digest` empty, and
    `problem` says why the newest is not used. `digest`: SHA-256 of the content that it read, hex; `taken_at`: epoch
    seconds on its host's clock."""

    what: str  # LENGTHS or GRAPHS
    subject: str  # model or tenant
    version: int | None
    digest: str
    taken_at: float | None
    problem: str


class FleetMessage(TypedDict):
    """A gateway's view of the fleet, for the scaler and the pages. `at`: epoch seconds on the clock that they share
    (Redis' TIME); readers check the age."""

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
    models: dict[str, ModelTraffic]  # the same rates, queue and wait by model, read by its scaler
    classes: list[ClassWindow]
    tenants: dict[str, int]  # open requests by tenant (bounded by `max_concurrency`); tenants without any are left out
    policy: str
    links: NotRequired[list[LinkMessage]]  # between prefill and decode instances
    decisions: NotRequired[list[DecisionCount]]
    learned: NotRequired[list[LearnedMessage]]  # at most MOST_LEARNED of each kind; absent from older releases
    # What happens to a request, by model: `up`, it is served; `undecoded`, it is prefilled, but no instance decodes;
    # `coming`, it waits for an instance that starts; `on_demand`, one is started for it; `none`, it is refused.
    capacity: NotRequired[dict[str, str]]
    # Instances that drain or left, and keep targets of recent requests that none keeps which serves.
    wanted: NotRequired[list[str]]
    counted_s: NotRequired[float]  # since the gateway started; absent from older releases
    pruning_orders: NotRequired[dict[str, int]]  # `OrderBook.taken`: counts since the gateway started


class TelemetryMessage(TypedDict):
    instance: str
    at: float
    load: dict[str, Any]


class QueueRow(TypedDict):
    """One queued request. No field changes just because time passes. Times are epoch seconds once published."""

    id: str
    tenant: str
    slo_class: str
    model: str
    prompt_tokens: int
    output_tokens: int  # expected
    ttft_s: float  # the target
    arrived_at: float
    due_at: float  # latest start for a first token in time
    gives_up_at: NotRequired[float]  # end of its waiting time; absent from gateways of an older release
    order: list[float]  # sort key within its model's queue, then arrival, then id
    hopeless: bool
    paused: bool  # by an operator
    priority: int | None


class QueueState(TypedDict):
    """The whole queue of one gateway at `version` of its `feed`; written when a reader asks for it."""

    gateway: str
    feed: str  # new each time the gateway starts to publish; versions of two feeds cannot be compared
    version: int
    asked: int  # number of the newest request for a whole state that this answers
    at: float
    rates: dict[str, float]  # requests/s finished by model, over the last 10 s
    rows: list[QueueRow]


class QueueChanges(TypedDict):
    """Changes from version `base` of a feed to `version`: new or changed rows, and ids that left the queue.

    Sent several times a second, even without changes: a reader whose version is not `base` has missed one and asks for
    the whole state. `total`: queued requests afterwards, so that a reader can check its result.
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


QUEUE_ROWS_SHOWN = 200  # most rows in one answer of the control API
MOST_LEARNED = 200  # length forests, or sets of pattern graphs, in a FleetMessage
LENGTHS, GRAPHS = "lengths", "graphs"  # what is learned: forests by model, sets of pattern graphs by tenant
QUEUE_PRESSURE_ROWS = 200  # the scaler gets the longest wait among this many most urgent rows


class LiveMessage(TypedDict):
    """An update to a browser: topic, sequence number (a gap means: fetch again), time of the data, and the data."""

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
    expires_at: float  # epoch seconds on the shared clock


class CommandAnswer(TypedDict):
    command: str
    gateway: str
    applied: list[str]
    gone: list[str]
    too_late: list[str]


class ExperimentMessage(TypedDict):
    """Progress of an experiment: `progress` is a share 0..1, `step` what runs now."""

    slug: str
    state: str
    progress: float
    step: str


class LevelLoad(TypedDict):
    """Flows of one level on a port; `held`: of them those that may not send now."""

    level: int
    flows: int
    held: int
    left_bytes: float


class PortLoad(TypedDict):
    """A port of a host, through which flows leave. `rate`: bytes/s over the last second."""

    port: str
    flows: int
    held: int
    rate: float
    levels: list[LevelLoad]


class HostFlow(TypedDict):
    """A flow in a transfer daemon. Times in seconds.

    - `request`: "" for a weight load. `due_in_s`: until it should arrive, negative if late; None without a target.
    - `levels`: each level that it has had, 1 the most urgent, and how long after its submit.
    - `end`: "" while it goes on, otherwise "ended" (sent), "given up", "expired" or "lost", `ended_s` ago.
    """

    id: str
    request: str
    stage: int
    port: str
    to: str
    size_bytes: float
    left_bytes: float
    due_in_s: float | None
    go: bool
    waiting: bool
    rate: float
    age_s: float
    held_s: float
    levels: list[tuple[float, int]]
    end: str
    ended_s: float


class HostFlows(TypedDict):
    """What a transfer daemon schedules. `at`: epoch seconds on the clock that all share. `bandwidth`: bytes/s of each
    port. `ending`: flows that still follow the previous policy. `orders`: of the coordinator of pruning by what became
    of them, as in `OrdersInForce.taken`; daemons of an older release do not say. `receives_at`: addresses of its link
    if its bandwidth was set; daemons of an older release do not say. `flows`: the most urgent of `open`, then the
    newest that ended."""

    host: str
    at: float
    policy: str
    bandwidth: float
    ports: list[PortLoad]
    open: int
    ending: int
    orders: NotRequired[dict[str, int]]
    receives_at: NotRequired[list[str]]
    flows: list[HostFlow]
