"""Traces: arrival times and lengths of requests, uploaded as CSV and replayed in simulations."""

from __future__ import annotations

import io
from typing import IO, Any, ClassVar

from rest_framework import serializers, status
from rest_framework.exceptions import NotFound
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator, IsViewer
from api.control.framework.base import BoundedJSONParser, ControlView, PageQuery
from api.control.framework.documented import CHANGED, CREATED, FOUND, operation, page_of
from controller.models import Trace
from controller.selectors.experiments import results as experiments
from controller.services.experiments.traces import BYTES_MAX, trace_create, trace_remove


class TraceOutput(serializers.ModelSerializer):
    """A registered trace. Seconds and tokens."""

    class Meta:
        model = Trace
        fields = (
            "slug", "name", "requests", "span_s", "input_tokens_mean", "output_tokens_mean", "created_by", "created_at",
        )  # fmt: skip
        read_only_fields = fields


class TraceInput(serializers.Serializer):
    """A trace. As `text/csv` or `application/gzip` the body is the file itself and `name` a query parameter."""

    name = serializers.CharField(max_length=120)
    file = serializers.CharField(
        trim_whitespace=False,
        help_text="CSV with a header: input_tokens, output_tokens, and optionally arrival_s, session, prefix_hashes.",
    )


class TraceName(serializers.Serializer):
    """Of a trace that is sent as a file."""

    name = serializers.CharField(max_length=120, required=False)


class FileParser(BaseParser):
    """Reads the raw body, up to one byte more than allowed, so that the service reports a file that is too large."""

    media_type = "text/csv"

    def parse(self, stream: IO[bytes], media_type: str | None = None, parser_context: Any = None) -> io.BytesIO:
        return io.BytesIO(stream.read(BYTES_MAX + 1))


class GzipParser(FileParser):
    """Reads a body compressed with gzip."""

    media_type = "application/gzip"


class TraceList(ControlView):
    """List registered traces, newest first; register traces."""

    access: ClassVar = {"GET": IsViewer, "POST": IsOperator}
    configures = False
    parser_classes: ClassVar = [BoundedJSONParser, FileParser, GzipParser]

    @operation("trace_list", "List traces", query=PageQuery, answer=page_of(TraceOutput))
    def get(self, request: Request) -> Response:
        return self.page(experiments.traces(), ("-created_at", "-id"), TraceOutput, self.query(PageQuery))

    @operation(
        "trace_create",
        "Register a trace",
        query=TraceName,
        body=TraceInput,
        answer=TraceOutput,
        status=201,
        errors=CREATED,
    )
    def post(self, request: Request) -> Response:
        if isinstance(request.data, io.BytesIO):
            name, content = self.query(TraceName).get("name", ""), request.data.getvalue()
        else:
            data = self.body(TraceInput)
            name, content = data["name"], data["file"].encode("utf-8", "surrogatepass")
        return self.one(
            trace_create(actor=self.actor, name=name, content=content), TraceOutput, status.HTTP_201_CREATED
        )


class TraceDetail(ControlView):
    """One registered trace."""

    access: ClassVar = {"GET": IsViewer, "DELETE": IsOperator}
    configures = False

    @operation("trace_get", "Read a trace", answer=TraceOutput, errors=FOUND)
    def get(self, request: Request, pk: str) -> Response:
        row = experiments.traces().filter(slug=pk).first()
        if row is None:
            raise NotFound("Trace not found.")
        return self.one(row, TraceOutput)

    @operation("trace_remove", "Remove a trace", status=204, errors=CHANGED)
    def delete(self, request: Request, pk: str) -> Response:
        trace_remove(actor=self.actor, slug=pk)
        return Response(status=status.HTTP_204_NO_CONTENT)
