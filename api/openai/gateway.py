"""One gateway: all its parts put together, and the way in for a request.

At arrival a request gets its tenant, its targets and its predicted lengths; its quota is charged. The predictions learn
from requests that end well.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from api.openai.asgi import Send
from api.openai.forks import Forks
from api.openai.in_flight import InFlightRequest
from api.openai.ledger import Instruments, Ledger
from api.openai.pacer import paced
from api.openai.protocol import response_streams as responses_stream
from api.openai.protocol.errors import ApiError, config_stale, shutting_down
from api.openai.protocol.response_streams import as_response
from api.openai.protocol.schemas import NamedPlace, Parsed
from api.openai.protocol.step_answers import Captured
from api.openai.protocol.translation import Translation
from api.openai.response_readers import ResponseReaders
from api.openai.runtime import Runtime, report_defect
from api.openai.shared_calls import SharedCalls
from api.openai.state.fleet import GatewayFleet
from api.openai.state.refusal_groups import RecordSink, RefusalGroups
from api.openai.state.scheduler_log import SchedulerLog
from api.openai.state.spool import RecordBounds
from api.openai.state.telemetry import Monitor, TelemetryBoard
from api.openai.steps import Steps, StoredStep
from api.openai.stored_responses import BackgroundAnswer, KeepingAnswer, StoredResponses
from api.openai.tenants import KeyRing, QueueBounds, Quotas
from api.openai.tokenizers import Tokenizers
from api.openai.workflows import Workflows
from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.errors import ConfigError
from controller.core.messages import LearnedMessage
from controller.core.snapshot import GatewaySnapshot, ModelConfig, TenantConfig
from controller.core.types import Outcome, Request, RequestRecord, given_up
from controller.dispatch import build_scheduler
from controller.dispatch.policy_sets import checked_ordering
from controller.predict.answer_lengths import AnswerLengths, Foretold
from controller.predict.lengths import PromptEstimates
from controller.predict.thinking_times import ThinkingTimes
from controller.scale.traffic import ModelRates
from controller.slo.classes import Applied, ClassBook, NotEntitled, SloError, check_fields, check_model
from controller.slo.stage_deadlines import LIVE_RULE
from controller.slo.workflow import WorkflowTime, within
from workers.backends.base import Limits
from workers.backends.http import delivers_token
from workers.forks import KvCheckpoint
from workers.shared_clock import SharedClock
from workers.steps import LARGEST_BYTES
from workers.workflows import WorkflowState

log = logging.getLogger(__name__)

JOINED = {"began": "workflow_began", "inherited": "workflow_inherited", "alone": "workflow_alone"}
CLOCK_NEWS_S = 0.05  # engines order requests by deadlines: less than a step or two of theirs is no news


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """`name` is this gateway's id; `overrides` as for `build_dispatcher`."""

    name: str
    policy: str = "slackline"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    token_pacing: float = 0.0  # pace of streamed tokens as a share of the TPOT target; 0: no pacing
    salt_key: bytes = b""  # of the salts that keep tenants apart in the prefix caches of engines; empty: no salts
    queue: QueueBounds = field(default_factory=QueueBounds)
    records: RecordBounds = field(default_factory=RecordBounds)
    config_max_age_s: float = math.inf  # requests are refused while the configuration is older
    metrics_token: str = ""  # who may read /metrics and the details of /healthz (`workers.http.details`)
    scheduler_log: Path | None = None  # where to record the scheduler's events and actions


class Caller(NamedTuple):
    """The tenant of an API key, and the key's id."""

    tenant: TenantConfig
    key_id: int


class Gateway:
    """Everything runs on the loop, and nothing blocks."""

    def __init__(
        self,
        options: GatewayOptions,
        session: aiohttp.ClientSession,
        sink: RecordSink,
        board: TelemetryBoard | None = None,
    ) -> None:
        self.options = options
        self.clock = time.monotonic
        self.started_at = self.clock()
        self.instruments = Instruments()
        self.scheduler = build_scheduler(options.policy, dict(options.overrides), report_defect)
        self.quotas = Quotas(options.queue, self.scheduler.dispatcher.config.max_queue)
        self._sink = sink
        self.refused = RefusalGroups(sink)
        self.ledger = Ledger(sink, self.refused, self.quotas, self.instruments, self._learn, self._tell)
        self.book = ClassBook((), ())
        self.prompt_lengths = PromptEstimates()
        self.answer_lengths = AnswerLengths()
        self.thinking = ThinkingTimes()
        self.fleet = GatewayFleet(session, options.limits, self.clock)
        self.shared = SharedClock(self.clock)
        self.monitor = Monitor(self.fleet, board, self.clock, self.shared)
        handle = self.scheduler.handle
        if options.scheduler_log is not None:
            handle = SchedulerLog(options.scheduler_log, self.scheduler, options.overrides).handle
        self.shared_calls = SharedCalls(self.ledger)
        self.runtime = self.shared_calls.runtime = Runtime(
            self.scheduler,
            self.fleet.backends,
            self.shared_calls,
            handle=handle,
            suspect=self.monitor.probe,
            heard=self.fleet.heard,
        )
        self.runtime.goes_on, self.runtime.requeued = self.shared_calls.goes_on, self.shared_calls.requeued
        self.fleet.bind(self.runtime)
        self.arrivals = ModelRates()
        self.snapshot: GatewaySnapshot | None = None
        self.keys = KeyRing(GatewaySnapshot(version=0))
        self.models: dict[str, ModelConfig] = {}  # by name and by alias
        self.named_models: dict[str, ModelConfig] = {}  # by name alone
        self.tokenizers = Tokenizers()
        self._ids = random.Random(secrets.randbits(256))  # unique, not secret: no system call for each
        self.workflows = Workflows(count=self.prompt_tokens)
        self.steps = Steps(self.shared.now, self.runtime.spawn)
        self.responses = StoredResponses(self.steps, self.shared.now, self.hang_up)
        self.readers = ResponseReaders(self.responses, lambda: self.closing)
        self.forks = Forks(self.fleet.backends, self.scheduler, self.runtime.spawn)
        self.used_keys: set[int] = set()  # since they were last written to the database
        self._salts: dict[str, bytes] = {}
        self.closing = False
        self._told_offset_s: float | None = None
        self._ordering = ev.OrderingChosen("")  # as it was chosen last
        self.unpublished: Counter[str] = Counter()  # by part, times that a defect kept it from being published
        self.learned_versions: Callable[[], list[LearnedMessage]] = list  # what is learned from records, as it is used
        self.redis = "none"  # "ok" or "away" once a publisher has tried it
        self.config_age_s: Callable[[], float | None] = lambda: None  # since the database confirmed it; None: never

    def configure(self, snapshot: GatewaySnapshot) -> None:
        """Apply a new configuration, from the next request on. What was learned and counted stays."""
        self.snapshot = snapshot
        before, self.keys = self.keys, KeyRing(snapshot)
        if revoked := before.revoked(self.keys, self._now()):
            self.runtime.end_revoked(revoked)
            self.shared_calls.end_revoked(revoked)
            self.readers.end_revoked(revoked)
        self.named_models = {model.name: model for model in snapshot.models}
        aliases = {alias: model for model in snapshot.models for alias in model.aliases}
        self.models = aliases | self.named_models
        self.tokenizers.configure(snapshot.models)
        self.steps.configure(snapshot.tenants)
        self.book = self.book.renewed(snapshot.classes, snapshot.mappings)
        self._order_by(snapshot)
        self.monitor.period_s = min(5.0, max(0.05, snapshot.telemetry_period_s))
        self.fleet.apply(snapshot)
        for instance_id, seat in self.fleet.seats.items():
            if not seat.up:  # one that has just started is found now and not a telemetry period later
                self.monitor.probe(instance_id)

    def _order_by(self, snapshot: GatewaySnapshot) -> None:
        """Exchange the ordering of waiting requests if another one was chosen."""
        chosen = ev.OrderingChosen(snapshot.ordering, json.dumps(snapshot.ordering_options, sort_keys=True))
        if chosen == self._ordering:
            return
        self._ordering = chosen
        try:
            if chosen.name:
                checked_ordering(chosen.name, snapshot.ordering_options)
        except ConfigError as error:  # of a newer release: the one in use stays
            log.warning("the chosen ordering is not used: %s", error)
            return
        self.runtime.push(chosen)

    @property
    def config_stale(self) -> bool:
        """Whether the configuration is older than it may be. Keys may have been revoked since."""
        age_s = self.config_age_s()
        return age_s is not None and age_s > self.options.config_max_age_s

    def _now(self) -> float:
        """Epoch seconds, by the clock that gateways share as far as it is known: an expired key must not work again
        because somebody sets the host's clock back."""
        return time.time() if self._told_offset_s is None else self.clock() + self._told_offset_s

    def tell_clock(self) -> None:
        """Tell the scheduler of the clock that gateways share, if that differs from what it was told."""
        offset_s = self.shared.offset
        if self._told_offset_s is None or abs(offset_s - self._told_offset_s) >= CLOCK_NEWS_S:
            self._told_offset_s = offset_s
            self.runtime.tell(ev.ClockOffset(offset_s))

    def caller(self, authorization: bytes | None) -> Caller:
        """Who calls with this API key. Raises ApiError."""
        if self.snapshot is None:
            raise ApiError("no_capacity", "The gateway has no configuration yet.", retry_after_s=2)
        if self.closing:
            raise shutting_down()
        if self.config_stale:
            raise config_stale()
        tenant, key = self.keys.tenant(authorization, self._now())
        self.used_keys.add(key.id)
        return Caller(tenant, key.id)

    def check_entitled(self, parsed: Parsed, tenant: TenantConfig) -> None:
        """Whether the tenant may ask for what the request names itself. Raises ApiError."""
        try:
            check_fields(parsed.asked, tenant.entitled)
            check_model(parsed.model.name, tenant.entitled)
        except NotEntitled as error:
            raise ApiError("permission_denied", f"{error}.", param=error.field) from None
        if parsed.step is not None and not tenant.retention_s:
            told = "metadata.step_key: this tenant's retention_s is 0, so no answer of it is kept."
            raise ApiError("permission_denied", told, param="metadata.step_key")

    def submit(
        self,
        parsed: Parsed,
        caller: Caller,
        send: Send,
        arrival: float,
        *,
        chat: bool,
        workflow: WorkflowTime | None = None,
        stored: StoredStep | None = None,
        origin: KvCheckpoint | None = None,
        name: str = "",
    ) -> InFlightRequest:
        """Let a request in: entitlements, targets, quota, scheduler. Raises ApiError, and then nothing is queued.

        `caller`: as of now, not as of when its body began to come. `workflow`: what its workflow has left.
        `stored`: the answer of its step, if that was kept. `origin`: of its branch. `name`: its id, if it has one
        already.
        """
        tenant = caller.tenant
        if workflow is not None:
            workflow = workflow.of_tenant(tenant)
        request, applied, foretold = self._request(parsed, tenant, arrival, workflow, name)
        # Records need epoch seconds; the body may have been parsed for a while since `arrival` was taken.
        arrived_wall = time.time() - (self.clock() - arrival)
        translation, send = self._response(parsed, request, send, arrived_wall)
        if parsed.streamed and self.options.token_pacing:
            carries = partial(delivers_token, chat=chat) if translation is None else responses_stream.carries_text
            send = paced(send, request.targets, self.options.token_pacing, self.clock, carries)
        in_flight = InFlightRequest(
            request,
            parsed.head,
            send,
            arrived_wall,
            chat=chat,
            streamed=parsed.streamed,
            keep_usage=parsed.keep_usage,
            text=parsed.text,
            source=applied.source,
            translation=translation,
            context_tokens=parsed.model.context_tokens,
            foretold=foretold,
        )
        in_flight.salt = self._salt(tenant.name)
        in_flight.key_id = caller.key_id
        in_flight.note(Decision("slo", applied.source, request.id, arrival, applied.figures))
        if workflow is not None:
            in_flight.note(_joined(request, workflow))
            in_flight.timed, in_flight.workflow_due = True, arrival + workflow.left_s
            in_flight.call_number = workflow.number
        in_flight.named = _place(parsed, workflow)
        if self.scheduler.suspects.quarantine:
            in_flight.identify()
        in_flight.stored = stored is not None
        self._charge(in_flight, tenant)
        if in_flight.timed:
            self.workflows.seen(tenant.name, request.workflow)
        self._arrive(in_flight, parsed, stored, origin)
        return in_flight

    def _response(
        self, parsed: Parsed, request: Request, send: Send, arrived_wall: float
    ) -> tuple[Translation | None, Send]:
        """What makes the answer a response, and keeps it, if it is to be one."""
        if parsed.echo is None:
            return None, send
        translation = as_response(parsed.echo, request.id, arrived_wall, streamed=parsed.streamed)
        if parsed.kept is not None and not isinstance(send, BackgroundAnswer):
            send = KeepingAnswer(self.responses, request.tenant, parsed.kept, send)
        if isinstance(send, BackgroundAnswer):
            send.translation = translation
        elif isinstance(send, KeepingAnswer):
            send.response = translation.response
        return translation, send

    def _arrive(
        self, in_flight: InFlightRequest, parsed: Parsed, stored: StoredStep | None, origin: KvCheckpoint | None
    ) -> None:
        """It was let in: its answer is stored, another request's call has it, or an engine will be asked."""
        request = in_flight.request
        if stored is not None:
            self.steps.replay(in_flight, stored, self.clock())
            self.ledger.ended(in_flight, Outcome.OK, self.clock())
            return
        if parsed.step is not None:
            in_flight.step, in_flight.captured = parsed.step, Captured(LARGEST_BYTES)
            in_flight.checkpoint_s = parsed.checkpoint_s
        avoid: frozenset[str] = frozenset()
        fork: Decision | None = None
        if parsed.branch:
            placed = self.forks.place(request, origin, self.clock())
            fork, avoid, in_flight.branch_of = placed.decision, placed.avoid, placed.branch_of
            # The scheduler counts what the branch adds, or it would hold back what costs next to nothing.
            new = request.prompt_tokens - placed.shared
            where = placed.instance
            in_flight.request = replace(request, prompt_tokens=new, shared_tokens=placed.shared, shared_at=where)
        equal = b"" if parsed.checkpoint_s else parsed.equal  # a checkpoint is found by the id of its own request
        if equal and not self.shared_calls.arrive(in_flight, request.tenant.encode() + b"\0" + equal, avoid):
            return  # the fleet gets no more to do
        if fork is not None:
            self.runtime.note(in_flight, fork)
        if not equal:
            self.runtime.arrive(in_flight, avoid)
        self.arrivals.tick(request.model, request.arrival)

    def hang_up(self, in_flight: InFlightRequest, why: str) -> None:
        """Its client is gone, or was hung up on."""
        if self.runtime.requests.get(in_flight.request.id) is in_flight:
            self.runtime.hang_up(in_flight, why)
        else:
            self.shared_calls.hang_up(in_flight, why)

    def end_workflow(self, tenant: str, workflow: str, by: str) -> None:
        """The workflow was cancelled: its requests end, and what is kept of it is forgotten."""
        self.steps.forget(tenant, workflow)
        self.forks.forget(tenant, workflow)
        self.runtime.end_workflow(tenant, workflow, by)
        self.shared_calls.end_workflow(tenant, workflow, by)

    def workflow_cancelled(self, tenant: str, workflow: str, found: WorkflowState) -> None:
        """Its client asked for that here. What is open of it ends, and it is recorded, since nothing may be."""
        self.end_workflow(tenant, workflow, found.cancelled_by)
        if (cancellation := self.workflows.to_record(tenant, workflow, found)) is not None:
            self._sink.cancelled(cancellation)

    def new_id(self) -> str:
        """Of a request."""
        return f"req-{self._ids.getrandbits(96):024x}"

    def _request(
        self, parsed: Parsed, tenant: TenantConfig, arrival: float, workflow: WorkflowTime | None, name: str
    ) -> tuple[Request, Applied, Foretold]:
        self.check_entitled(parsed, tenant)  # what the client says, not what a workflow leaves it
        model = parsed.model
        asked = parsed.asked
        try:
            applied = self.book.resolve(asked, tenant, self.scheduler.pending_above, arrival)
        except NotEntitled as error:
            raise ApiError("permission_denied", f"{error}.", param=error.field) from None
        except SloError as error:
            raise ApiError("invalid_slo", str(error), param=error.field) from None
        whole_s = None  # of a workflow that none of its steps has begun yet
        if workflow is not None:
            whole_s = workflow.whole_s if workflow.first and not applied.may_defer else None
            applied = within(applied, workflow, own_waiting=asked.waiting_time is not None)
        applied = self._with_time_to_think(applied, tenant.name, model.name)
        prompt = self.prompt_tokens(parsed)
        kind = (tenant.name, applied.slo_class, model.name)
        foretold = self.answer_lengths.foretell(kind, parsed.workflow, prompt, parsed.max_tokens)
        # Estimates may exceed the context; the engine refuses what really does.
        least, most = foretold.bounds or (foretold.expected, foretold.expected)
        context = model.context_tokens
        request = Request(
            id=name or self.new_id(),
            arrival=arrival,
            targets=applied.targets,
            prompt_tokens=max(1, min(prompt, context)),
            output_tokens=max(1, min(foretold.expected, context)),
            least_tokens=min(least, context) if foretold.bounds else None,
            most_tokens=min(most, context) if foretold.bounds else None,
            model=model.name,
            tenant=tenant.name,
            slo_class=applied.slo_class,
            priority=applied.priority,
            level=applied.level,
            value=applied.value,
            may_defer=applied.may_defer,
            max_tokens=parsed.max_tokens,
            workflow=parsed.workflow,
            stage=parsed.stage,
            workflow_left_s=None if workflow is None else workflow.left_s,
            whole_s=whole_s,
        )
        return request, applied, foretold

    def _with_time_to_think(self, applied: Applied, tenant: str, model: str) -> Applied:
        """With a thinking deadline the first token is due by so much earlier as reasoning may take. That is a guess:
        requests are refused for the deadline alone."""
        targets = applied.targets
        if targets.thinking_s is None:
            return applied
        first_s = self.thinking.first_token_s(tenant, model, targets.thinking_s)
        if first_s >= targets.ttft_s:
            return applied
        figures = {**applied.figures, "thinking_s": round(self.thinking.expected_s(tenant, model), 3)}
        return replace(applied, targets=targets._replace(ttft_s=first_s), figures=figures)

    def prompt_tokens(self, parsed: Parsed) -> int:
        """Counted by a tokenizer, or estimated."""
        return parsed.prompt_tokens or self.prompt_lengths.tokens(parsed.model, parsed.text)

    def _salt(self, tenant: str) -> bytes:
        """A tenant's salt, which no other tenant can know. Without it, how fast a first token comes tells whether
        somebody else has sent the same prompt."""
        salt = self._salts.get(tenant)
        if salt is None:
            key = self.options.salt_key
            salt = self._salts[tenant] = hmac.digest(key, tenant.encode(), "sha256").hex()[:32].encode() if key else b""
        return salt

    def _charge(self, in_flight: InFlightRequest, tenant: TenantConfig) -> None:
        request = in_flight.request
        in_flight.charged_tokens = 0 if in_flight.stored else request.prompt_tokens + request.output_tokens
        try:
            self.quotas.admit(tenant, in_flight.charged_tokens, request.arrival)
            in_flight.quota = self.quotas.headers(tenant.name)
        except ApiError as error:
            self.ledger.note(in_flight, Outcome.REFUSED, self.clock(), code=error.code, status=error.status)
            in_flight.quota = self.quotas.headers(tenant.name)
            error.about = in_flight.headers()
            raise

    def _tell(self, in_flight: InFlightRequest, record: RequestRecord) -> None:
        """A request that was let in has ended: its workflow is told, the answer of a step is kept, and one that was cut
        judges the bounds that it went beyond."""
        answered = record.outcome == Outcome.OK.value
        if not answered and in_flight.sends and not in_flight.follows and in_flight.foretold is not None:
            request = in_flight.request
            self.answer_lengths.cut_off(request.model, in_flight.foretold, record.output_tokens, in_flight.judging)
        if in_flight.timed:
            tokens = record.output_tokens if record.attempts else 0  # else another request has them
            self.workflows.ended(
                record.tenant,
                record.workflow,
                answered=answered,
                output_tokens=tokens,
                number=in_flight.call_number,
                computed=record.attempts > 0,  # neither kept nor another request's
                given_up=given_up(record.step_key, record.error_code),
            )
        if answered and in_flight.step is not None:
            self.steps.keep(in_flight)
            if in_flight.checkpoint_s:
                self.forks.ended(in_flight)

    def _learn(self, in_flight: InFlightRequest, record: RequestRecord, now: float) -> None:
        """A request ended well: the next ones of its kind are predicted from it."""
        request = in_flight.request
        if in_flight.foretold is not None:
            kind = (request.tenant, request.slo_class, request.model)
            most = min(request.max_tokens or math.inf, in_flight.context_tokens - record.prompt_tokens)
            self.answer_lengths.observe(
                kind,
                request.workflow,
                in_flight.foretold,
                record.output_tokens,
                ended=record.output_tokens < most,
                again=in_flight.judging,
            )
        model = self.named_models.get(request.model)
        if in_flight.text.chars and in_flight.usage is not None and model is not None:
            expected = request.prompt_tokens + request.shared_tokens
            self.prompt_lengths.observe(model, in_flight.text, expected, in_flight.usage.prompt_tokens)
        # What was out before it joined a shared call, it got at once.
        if record.first_answer_s is not None and record.ttft_s:
            self.thinking.observe(request.tenant, request.model, record.first_answer_s - record.ttft_s)
        if request.level is not None:
            queue_s = record.queue_s or 0.0
            self.book.observe(request.tenant, request.level, record.ttft_s, record.tpot_s, queue_s, now)


def _place(parsed: Parsed, workflow: WorkflowTime | None) -> NamedPlace:
    key = "" if parsed.step is None else parsed.step.key
    return NamedPlace(key, parsed.parents, () if workflow is None else workflow.tool_steps)


def _joined(request: Request, workflow: WorkflowTime) -> Decision:
    """What the record says of the request's workflow."""
    reason = "workflow_late" if workflow.late else JOINED[workflow.source]
    figures: dict[str, Figure] = {"left_s": round(workflow.left_s, 3), "steps_left": workflow.steps_left}
    if not workflow.late:
        figures["step_s"] = round(workflow.step_s, 3)
        figures["shared_by"] = workflow.rule
        if workflow.division != LIVE_RULE:
            figures["stage_deadlines"] = workflow.division
        if workflow.graph_version is not None:
            figures |= {"graph_version": workflow.graph_version, "similarity": round(workflow.similarity, 3)}
    return Decision("workflow", reason, request.workflow, request.arrival, figures)
