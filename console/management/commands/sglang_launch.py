"""`manage.py sglang_launch --seed INSTANCE --port N`: the command that starts another SGLang like a running one.

Its weights come from the seed's memory. It is printed, not run: SGLang servers are started by whoever owns their hosts,
then registered (`register_instances --backend sglang`).
"""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controller.core.errors import ConfigError
from controller.core.types import InstanceSpec, Role
from controller.models import Instance
from workers.backends.base import Backend, EngineError, NotSupported
from workers.backends.calls import ask
from workers.backends.sglang import SglangBackend
from workers.backends.sglang_launch import WAYS, joiner_arguments
from workers.backends.sglang_state import ServerInfo


class Command(BaseCommand):
    """Reads what the seed says of itself, and refuses what could not work, by name."""

    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--seed", required=True, help="an instance of backend sglang that serves")
        parser.add_argument("--port", type=int, required=True, help="of the new server")
        parser.add_argument("--way", default="transfer_engine", choices=WAYS, help="how the weights travel")
        parser.add_argument("--role", default=None, choices=Role, type=Role, help="the seed's if absent")
        parser.add_argument(
            "--ports", default="", help="for nccl: free ports on the seed's host, one a rank, such as 29600,29601"
        )

    def handle(self, *, seed: str, port: int, way: str, role: Role | None, ports: str, **options: Any) -> None:
        row = Instance.objects.serving().select_related("model").filter(pk=seed, backend="sglang").first()
        if row is None:
            raise CommandError(f"seed: {seed!r} is no SGLang instance that serves now")
        spec = InstanceSpec(row.pk, row.model.name, url=row.url, backend="sglang")
        try:
            given = [int(each) for each in ports.split(",") if each]
        except ValueError:
            raise CommandError("ports: whole numbers with commas between them") from None
        try:
            info = ask(spec, _awake)
            made = joiner_arguments(row.url, info, way=way, role=role or info.role, port=port, ports=given)
        except (ConfigError, NotSupported) as error:
            raise CommandError(f"{error.field}: {error}") from error
        except EngineError as error:
            raise CommandError(f"seed: {error}") from error
        self.stdout.write(shlex.join(["python", "-m", "sglang.launch_server", *made]))


async def _awake(backend: Backend) -> ServerInfo:
    """A seed that sleeps has no weights to give."""
    if not isinstance(backend, SglangBackend):
        raise EngineError(f"instance {backend.spec.id} is no SGLang server")
    info = await backend.known()
    if not await backend.ready():
        raise EngineError(f"instance {backend.spec.id} is paused or not ready")
    return info
