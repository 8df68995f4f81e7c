"""What gateways did with published versions of length forests and pattern graphs, as under *Answer lengths*, *History*.
Newest first."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import operation, page_of
from controller.core.messages import GRAPHS, LENGTHS
from controller.models import LearnedTakeover

LOOKUPS = {"what": "what", "subject": "subject", "version": "version", "gateway": "gateway"}


class LearnedTakeoverQuery(PageQuery):
    """Filters of the list."""

    what = serializers.ChoiceField(choices=(LENGTHS, GRAPHS), required=False)
    subject = serializers.CharField(max_length=120, required=False, help_text="A model (lengths) or tenant (graphs).")
    version = serializers.IntegerField(min_value=1, max_value=2**31 - 1, required=False)
    gateway = serializers.CharField(max_length=150, required=False)


class LearnedTakeoverOutput(serializers.ModelSerializer):
    """One outcome of a version at a gateway. Times are of the gateway's clock."""

    what = serializers.ChoiceField(choices=(LENGTHS, GRAPHS))
    subject = serializers.CharField(help_text="The model (lengths) or tenant (graphs).")
    problem = serializers.CharField(
        allow_blank=True, help_text="Why it did not use the version; empty where it took it over."
    )
    times = serializers.IntegerField(help_text="How often; above 1 after restarts of the gateway.")

    class Meta:
        model = LearnedTakeover
        fields = ("id", "what", "subject", "version", "gateway", "problem", "first_at", "last_at", "times")
        read_only_fields = fields


class LearnedTakeoverList(ControlView):
    """What gateways did with each of the versions that are kept (the newest 100 of a model or tenant)."""

    access: ClassVar = {"GET": IsViewer}

    @operation("learned_takeover_list", "List what gateways did with versions", query=LearnedTakeoverQuery,
               answer=page_of(LearnedTakeoverOutput))  # fmt: skip
    def get(self, request: Request) -> Response:
        query = self.query(LearnedTakeoverQuery)
        rows = filtered(LearnedTakeover.objects.all(), query, LOOKUPS)
        return self.page(rows, ("-id",), LearnedTakeoverOutput, query)
