"""`manage.py register_instances NAME=URL ...`: add running servers (vLLM, SGLang, compose) to the fleet."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from controller.models import Instance, ServedModel
from controller.models.fleet import KvRole, Role
from controller.services.actors import SYSTEM
from controller.services.fleet.launches import instance_join
from controller.services.fleet.served_models import served_model_create
from controller.wording.values import BACKEND_NAMES

OPTIONS = ("backend", "role", "kv_role", "context_tokens", "max_num_seqs", "device_kind", "key_name")


class Command(BaseCommand):
    """Idempotent: registered names are skipped. Instances serve requests as soon as they respond."""

    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("instances", nargs="+", metavar="NAME=URL")
        parser.add_argument("--model", required=True, help="name of the model they serve")
        parser.add_argument("--backend", default="vllm", choices=tuple(BACKEND_NAMES))
        parser.add_argument("--role", default="collocated", choices=Role.values, help="role of the instances")
        parser.add_argument(
            "--kv-role",
            choices=KvRole.values,
            help="kv_role of a vLLM server; with kv_both the scaler may change its role",
        )
        parser.add_argument(
            "--context-tokens", type=int, help="create the model with this context length if it does not exist"
        )
        parser.add_argument(
            "--max-num-seqs", type=int, help="maximum concurrent sequences (default: as the server reports)"
        )
        parser.add_argument("--key-name", default="", help="file in ENGINE_KEYS_DIR with the server's API key")
        parser.add_argument("--device-kind", default="", help="device kind, which selects the latency profile")

    def handle(self, *, instances: list[str], model: str, **options: Any) -> None:
        served = _model(model, options["context_tokens"])
        for item in instances:
            name, separator, url = item.partition("=")
            if not separator or not url:
                raise CommandError(f"{item!r}: must be NAME=URL, for example engine-1=http://engine-1:8100")
            if Instance.objects.filter(pk=name).exists():
                self.stdout.write(f"{name} is already registered")
                continue
            given = {key: options[key] for key in ("backend", "role", "max_num_seqs", "device_kind", "key_name")}
            spec = {"kv_role": options["kv_role"]} if options["kv_role"] else {}
            try:
                instance_join(actor=SYSTEM, id=name, model=served, url=url, spec=spec, **given)
            except ValidationError as error:
                raise CommandError(f"{name}: {options_told(error)}") from error
            self.stdout.write(f"Registered {name} at {url}")


def _model(name: str, context_tokens: int | None) -> ServedModel:
    served = ServedModel.objects.filter(name=name).first()
    if served is not None:
        return served
    if context_tokens is None:
        raise CommandError(f"model {name!r} does not exist; create it with --context-tokens N or the control API")
    try:
        return served_model_create(actor=SYSTEM, name=name, context_tokens=context_tokens)
    except ValidationError as error:
        raise CommandError(f"model {name!r}: {options_told(error)}") from error


def options_told(error: ValidationError) -> str:
    """The first message of each invalid option; further ones repeat it in other words."""
    fields = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
    named = {name: f"--{name.replace('_', '-')}: " if name in OPTIONS else "" for name in fields}
    return " ".join(f"{named[name]}{messages[0]}" for name, messages in fields.items())
