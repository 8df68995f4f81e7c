"""Simulations: a workload with several policy sets or fleets, run by the serving code in virtual time.

They are the experiments of the console. `spec` is the simulator's JSON, in which fleets, recorded traffic and traces
may be named.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers, status
from rest_framework.exceptions import NotFound
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator, IsViewer
from api.control.framework.base import ControlView, PageQuery
from api.control.framework.documented import CHANGED, CREATED, FOUND, PATCHED, operation, page_of
from api.control.framework.errors import Conflict
from api.control.framework.fields import JsonObjectField, VersionedOutput, VersionField
from api.control.framework.preconditions import claimed_version
from controller.core.errors import ConfigError
from controller.models import Experiment
from controller.selectors.experiments import results as experiments
from controller.services.experiments.commands import (
    experiment_cancel,
    experiment_create,
    experiment_remove,
    experiment_update,
)
from workers.experiments.shipped_profiles import shipped_profile


class SimulationQuery(PageQuery):
    """Filters of the list."""

    state = serializers.ChoiceField(choices=Experiment.State.choices, required=False)
    kept = serializers.BooleanField(required=False, allow_null=True, default=None)
    q = serializers.CharField(max_length=120, required=False, source="text", help_text="Part of the name.")


@extend_schema_field({"type": "object", "additionalProperties": True})
class SpecField(JsonObjectField):
    """Deeper and larger than other objects: fleets and tasks lie in it."""

    depth_max = 8
    values_max = 5_000


class SimulationInput(serializers.Serializer):
    """A new simulation."""

    name = serializers.CharField(max_length=120, required=False, allow_blank=True, default="")
    spec = SpecField(
        help_text=(
            "`instances` (a list, or `{fleet: today or then, model, change, role}`; `profile`: a shipped name or "
            "coefficients), `workload` (`kind`: mix, tasks, programs, trace with `path` a trace's slug, or window with "
            "`since`, `until`, `model`, `tenant`, `slo_class`), `policies` (names or `{name, label, overrides, engine, "
            "instances}`), `rates` or `knee`, `seeds`, `settings`, `level`, `warmup_s`: see "
            "controller/simulator/README.md."
        )
    )


class SimulationPatch(serializers.Serializer):
    """A change; absent fields keep their values."""

    name = serializers.CharField(max_length=120, required=False)
    kept = serializers.BooleanField(required=False, help_text="Whether it is kept for longer than 30 days.")
    version = VersionField()


class SimulationSummary(VersionedOutput):
    """One row of the list."""

    compares = serializers.ListField(source="labels", child=serializers.CharField(), read_only=True)

    class Meta:
        model = Experiment
        fields: tuple[str, ...] = (
            "slug", "name", "state", "progress", "step", "compares", "kept", "error", "error_field", "created_by",
            "created_at", "started_at", "ended_at", "spent_s", "version",
        )  # fmt: skip
        read_only_fields = fields


class SimulationOutput(SimulationSummary):
    """One simulation with its resolved spec; the figures are under `/result`."""

    spec = serializers.DictField()
    notes = serializers.ListField(child=serializers.CharField())

    class Meta(SimulationSummary.Meta):
        fields = (*SimulationSummary.Meta.fields, "spec", "notes")
        read_only_fields = fields


class SimulationResultSerializer(serializers.Serializer):
    """Medians over the seeds by policy and rate, and the first seed's whole report."""

    name = serializers.CharField()
    seeds = serializers.ListField(child=serializers.IntegerField())
    knee = serializers.FloatField(allow_null=True)
    level = serializers.FloatField()
    entries = serializers.ListField(child=serializers.DictField())


class _SimulationView(ControlView):
    configures = False

    def row(self, slug: str) -> Experiment:
        found = experiments.experiments().filter(slug=slug).first()
        if found is None:
            raise NotFound("Simulation not found.")
        return found

    def ended(self, slug: str) -> Experiment:
        """The simulation if it is done. Raises Conflict with its state otherwise."""
        row = self.row(slug)
        if row.state != Experiment.State.DONE:
            raise Conflict(f"No result: the simulation is {row.state}. {row.error}".strip())
        return row


class SimulationList(_SimulationView):
    """List simulations, newest first; create simulations."""

    access: ClassVar = {"GET": IsViewer, "POST": IsOperator}

    @operation("simulation_list", "List simulations", query=SimulationQuery, answer=page_of(SimulationSummary))
    def get(self, request: Request) -> Response:
        query = self.query(SimulationQuery)
        rows = experiments.experiments(state=query.get("state"), kept=query.get("kept"), text=query.get("text"))
        return self.page(rows.defer("result"), experiments.ORDER, SimulationSummary, query)

    @operation(
        "simulation_create",
        "Create a simulation",
        body=SimulationInput,
        answer=SimulationOutput,
        status=201,
        errors=CREATED,
    )
    def post(self, request: Request) -> Response:
        data = self.body(SimulationInput)
        try:
            row = experiment_create(actor=self.actor, read_profile=shipped_profile, **data)
        except ConfigError as error:
            field = "spec" if error.field in (None, "", "spec") else f"spec.{error.field}"
            raise ConfigError(str(error), field=field) from error
        return self.one(row, SimulationOutput, status.HTTP_201_CREATED)


class SimulationDetail(_SimulationView):
    """One simulation."""

    access: ClassVar = {"GET": IsViewer, "PATCH": IsOperator, "DELETE": IsOperator}

    @operation("simulation_get", "Read a simulation", answer=SimulationOutput, errors=FOUND)
    def get(self, request: Request, pk: str) -> Response:
        return self.one(self.row(pk), SimulationOutput)

    @operation(
        "simulation_update", "Name or keep a simulation", body=SimulationPatch, answer=SimulationOutput, errors=PATCHED
    )
    def patch(self, request: Request, pk: str) -> Response:
        data = self.body(SimulationPatch, partial=True)
        version = claimed_version(request, data)
        row = experiment_update(actor=self.actor, experiment_id=self.row(pk).pk, version=version, changes=data)
        return self.one(row, SimulationOutput)

    @operation("simulation_remove", "Remove a simulation", status=204, errors=CHANGED)
    def delete(self, request: Request, pk: str) -> Response:
        experiment_remove(actor=self.actor, slug=self.row(pk).slug)
        return Response(status=status.HTTP_204_NO_CONTENT)


class SimulationCancel(_SimulationView):
    """Cancel a queued or running simulation."""

    access: ClassVar = {"POST": IsOperator}

    @operation("simulation_cancel", "Cancel a simulation", answer=SimulationOutput, errors=CHANGED)
    def post(self, request: Request, pk: str) -> Response:
        row = self.row(pk)
        if row.state not in Experiment.OPEN:
            raise Conflict(f"The simulation has already ended ({row.state}).")
        return self.one(experiment_cancel(actor=self.actor, slug=row.slug), SimulationOutput)


class SimulationResultView(_SimulationView):
    """The figures of a simulation."""

    access: ClassVar = {"GET": IsViewer}

    @operation(
        "simulation_result", "Read a simulation's result", answer=SimulationResultSerializer, errors=(*FOUND, 409)
    )
    def get(self, request: Request, pk: str) -> Response:
        return Response(self.ended(pk).result)


class _AlwaysJson(DefaultContentNegotiation):
    """Renders errors as JSON whatever the `Accept` header contains, which may be `text/csv`."""

    def select_renderer(self, request: Request, renderers: Any, format_suffix: str | None = None) -> Any:
        return renderers[0], renderers[0].media_type


class SimulationResultCsv(_SimulationView):
    """The figures as a table: one row for each policy and rate, followed by one for each class."""

    access: ClassVar = {"GET": IsViewer}
    content_negotiation_class = _AlwaysJson

    @operation("simulation_result_csv", "Read a simulation's result as CSV", errors=(*FOUND, 409))
    def get(self, request: Request, pk: str) -> HttpResponse:
        row = self.ended(pk)
        head = {"Content-Disposition": f'attachment; filename="{row.slug}.csv"'}
        return HttpResponse(experiments.as_csv(row), content_type="text/csv; charset=utf-8", headers=head)
