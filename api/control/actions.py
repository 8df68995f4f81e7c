"""Actions: long-running operations on instances and their outcomes. Newest first."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import FOUND, operation, page_of
from controller.models import Action
from controller.selectors.catalogue import actions

LOOKUPS = {"instance": "instance_id", "kind": "kind", "state": "state"}


class ActionQuery(PageQuery):
    """Filters of the list."""

    instance = serializers.CharField(max_length=64, required=False, help_text="An instance's id.")
    kind = serializers.ChoiceField(choices=Action.Kind.choices, required=False)
    state = serializers.ChoiceField(choices=Action.State.choices, required=False)


class AttemptOutput(serializers.Serializer):
    """One source that was tried. `error` is empty for the source that supplied the weights."""

    kind = serializers.CharField(help_text="engine, host or disk.")
    url = serializers.CharField(allow_blank=True)
    source = serializers.CharField(allow_blank=True, help_text="Id of the engine behind the url, where it is known.")
    seconds = serializers.FloatField()
    bytes = serializers.IntegerField()
    flow = serializers.CharField(
        required=False,
        help_text="With flow scheduling: `scheduled`, or why this load was not scheduled. Otherwise empty.",
    )
    held_s = serializers.FloatField(required=False, help_text="Of `seconds`: while it was held for other transfers.")
    level = serializers.IntegerField(required=False, help_text="Its last level, 1 the most urgent, 0 unknown.")
    error = serializers.CharField(allow_blank=True)


class ActionOutput(serializers.ModelSerializer):
    """An action. `tries`: number of attempts; `decision`: id of the decision that ended it."""

    instance = serializers.CharField(source="instance_id")
    params = serializers.DictField()
    attempts = AttemptOutput(many=True)
    decision = serializers.IntegerField(source="decision_id", allow_null=True)

    class Meta:
        model = Action
        fields = (
            "id", "kind", "instance", "state", "params", "tries", "attempts", "error", "actor", "actor_type",
            "decision", "created_at", "ended_at",
        )  # fmt: skip
        read_only_fields = fields


class ActionList(ControlView):
    """All actions, newest first."""

    access: ClassVar = {"GET": IsViewer}

    @operation("action_list", "List actions", query=ActionQuery, answer=page_of(ActionOutput))
    def get(self, request: Request) -> Response:
        query = self.query(ActionQuery)
        return self.page(filtered(actions(), query, LOOKUPS), ("-id",), ActionOutput, query)


class ActionDetail(ControlView):
    """One action."""

    access: ClassVar = {"GET": IsViewer}

    @operation("action_get", "Read an action", answer=ActionOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(actions(), pk), ActionOutput)
