"""`manage.py sglang_launch --id NEW --seed INSTANCE --port N`: print the command that starts a copy of a server.

The new server loads its weights from the memory of the seed. The command is printed, not run: whoever owns the host
runs it and registers the server (`register_instances --backend sglang`). It is stored in the Decision `engine_launch`;
if the id is registered within an hour, its time to first served request counts from there.
"""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controller.core.errors import ConfigError
from controller.core.types import InstanceSpec, Role
from controller.models import Instance
from controller.services.actors import SYSTEM
from controller.services.fleet.launches import launch_record
from workers.backends.base import Backend, EngineError, NotSupported
from workers.backends.registry import ask
from workers.backends.sglang import SglangBackend
from workers.backends.sglang_launch import WAYS, joiner_arguments
from workers.backends.sglang_state import ServerInfo


class Command(BaseCommand):
    """Reads the settings of the seed and rejects options that cannot work, naming them."""

    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--id", required=True, help="instance id of the new server")
        whose = parser.add_mutually_exclusive_group(required=True)
        whose.add_argument("--seed", help="ready instance with backend sglang to copy from")
        whose.add_argument("--model", help="use the first suitable instance of this model as the seed")
        parser.add_argument("--port", type=int, required=True, help="port of the new server")
        parser.add_argument("--way", default="transfer_engine", choices=WAYS, help="how the weights are transferred")
        parser.add_argument(
            "--role", default=None, choices=Role, type=Role, help="role of the new server (default: as the seed)"
        )
        parser.add_argument(
            "--ports",
            default="",
            help="for nccl: free ports on the host of the seed, one per rank, for example 29600,29601",
        )

    def handle(
        self, *, id: str, seed: str | None, model: str | None, port: int, way: str, role: Role | None, ports: str,
        **options: Any,
    ) -> None:  # fmt: skip
        try:
            given = [int(each) for each in ports.split(",") if each]
        except ValueError:
            raise CommandError("ports: must be whole numbers separated by commas") from None
        if Instance.objects.filter(pk=id).exists():
            raise CommandError(f"id: instance {id!r} already exists")
        rows = Instance.objects.serving().select_related("model").filter(backend="sglang").order_by("pk")
        rejected: dict[str, str] = {}
        for row in rows.filter(pk=seed) if seed else rows.filter(model__name=model):
            try:
                info = ask(InstanceSpec(row.pk, row.model.name, url=row.url, backend="sglang", key=row.key), _awake)
                made = joiner_arguments(row.url, info, way=way, role=role or info.role, port=port, ports=given)
            except (ConfigError, NotSupported) as error:
                rejected[row.pk] = f"{error.field}: {error}"
            except EngineError as error:
                rejected[row.pk] = f"seed: {error}"
            else:
                told = shlex.join(["python", "-m", "sglang.launch_server", *made])
                how = {"way": way, "role": (role or info.role).value, "port": port, "model": row.model.name}
                launch_record(actor=SYSTEM, instance_id=id, seed=row.pk, command=told, inputs=how, rejected=rejected)
                self.stdout.write(told)
                return
        if not rejected:
            whom = f"{seed!r} is not a ready SGLang instance" if seed else f"no ready SGLang instance serves {model!r}"
            raise CommandError(f"seed: {whom}")
        raise CommandError("; ".join(rejected.values() if seed else (f"{k}: {v}" for k, v in rejected.items())))


async def _awake(backend: Backend) -> ServerInfo:
    """An instance that sleeps has no weights to copy."""
    if not isinstance(backend, SglangBackend):
        raise EngineError(f"instance {backend.spec.id} is not an SGLang server")
    info = await backend.known()
    if not await backend.ready():
        raise EngineError(f"instance {backend.spec.id} is paused or not ready")
    return info
