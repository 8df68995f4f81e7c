"""`manage.py register_instances NAME=URL ...`: engines that others run (compose, vLLM, SGLang) join the fleet."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from controller.models import Instance, ServedModel
from controller.models.fleet import KvRole, Role
from controller.services.actors import SYSTEM
from controller.services.launches import instance_join
from controller.services.served_models import served_model_create

OPTIONS = ("backend", "role", "kv_role", "context_tokens", "max_num_seqs", "device_kind")


class Command(BaseCommand):
    """Idempotent: a name that is registered already stays as it is. They serve once they answer."""

    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("instances", nargs="+", metavar="NAME=URL")
        parser.add_argument("--model", required=True, help="public name of the model they serve")
        parser.add_argument("--backend", default="vllm", choices=("vllm", "sglang", "reference"))
        parser.add_argument("--role", default="collocated", choices=Role.values, help="the stage they serve")
        parser.add_argument(
            "--kv-role", choices=KvRole.values, help="a vLLM's own: with kv_both the scaler may turn it"
        )
        parser.add_argument("--context-tokens", type=int, help="make the model, with this context, if there is none")
        parser.add_argument("--max-num-seqs", type=int, help="sequences at once (as many as the server says itself)")
        parser.add_argument("--device-kind", default="", help="what they run on: the profile of that kind applies")

    def handle(self, *, instances: list[str], model: str, **options: Any) -> None:
        served = _model(model, options["context_tokens"])
        for item in instances:
            name, separator, url = item.partition("=")
            if not separator or not url:
                raise CommandError(f"{item!r}: write NAME=URL, such as engine-1=http://engine-1:8100")
            if Instance.objects.filter(pk=name).exists():
                self.stdout.write(f"{name} is registered already")
                continue
            given = {key: options[key] for key in ("backend", "role", "max_num_seqs", "device_kind")}
            spec = {"kv_role": options["kv_role"]} if options["kv_role"] else {}
            try:
                instance_join(actor=SYSTEM, id=name, model=served, url=url, spec=spec, **given)
            except ValidationError as error:
                raise CommandError(f"{name}: {options_told(error)}") from error
            self.stdout.write(f"registered {name} at {url}")


def _model(name: str, context_tokens: int | None) -> ServedModel:
    served = ServedModel.objects.filter(name=name).first()
    if served is not None:
        return served
    if context_tokens is None:
        raise CommandError(f"there is no model {name!r}: --context-tokens N makes it, so does the control API")
    try:
        return served_model_create(actor=SYSTEM, name=name, context_tokens=context_tokens)
    except ValidationError as error:
        raise CommandError(f"model {name!r}: {options_told(error)}") from error


def options_told(error: ValidationError) -> str:
    """Each option that is wrong, with the first thing that is: others say the same again in other words."""
    fields = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
    named = {name: f"--{name.replace('_', '-')}: " if name in OPTIONS else "" for name in fields}
    return " ".join(f"{named[name]}{messages[0]}" for name, messages in fields.items())
