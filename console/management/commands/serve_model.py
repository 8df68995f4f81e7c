"""`manage.py serve_model`: serve a local model with one instance that is started from a launch template."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from controller.models import Instance, LaunchTemplate, ServedModel
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_create
from controller.services.fleet.launch_templates import shipped_templates_store
from controller.services.fleet.served_models import served_model_create

SLOTS = 16
LONGEST = 8192  # tokens: a model may promise a context for which this machine has no memory


class Command(BaseCommand):
    """Idempotent, so it runs at each start of `make up MODEL=...`: an instance of the model that runs, or should, is
    enough. The model's name is that of its folder."""

    help = __doc__

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, help="folder of the model, with config.json and weights")
        parser.add_argument("--template", default="vllm", help="launch template (default: %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        folder: Path = options["folder"].expanduser().resolve()
        context = _context(folder)
        shipped_templates_store()
        template = LaunchTemplate.objects.filter(name=options["template"]).first()
        if template is None:
            known = ", ".join(LaunchTemplate.objects.values_list("name", flat=True))
            raise CommandError(f"ENGINE: there is no launch template {options['template']!r}; known: {known}")
        try:
            with transaction.atomic():
                name = self._serve(folder, context, template)
        except ValidationError as error:
            raise CommandError(f"MODEL: {' '.join(error.messages)}") from error
        self.stdout.write(f"The model {name} is served by {template}.")

    def _serve(self, folder: Path, context: int, template: LaunchTemplate) -> str:
        model = ServedModel.objects.filter(name=folder.name).first()
        if model is None:
            model = served_model_create(actor=SYSTEM, name=folder.name, context_tokens=context)
        wanted = Instance.objects.live().filter(model=model, desired_state=Instance.Desired.RUNNING)
        if not wanted.exists():
            spec = {"folder": str(folder)}
            instance_create(actor=SYSTEM, model=model, template=template, max_num_seqs=SLOTS, spec=spec)
        return model.name


def _context(folder: Path) -> int:
    """The context length in its config, at most LONGEST."""
    try:
        config = json.loads((folder / "config.json").read_text())
        longest = int(config.get("max_position_embeddings") or LONGEST)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CommandError(f"MODEL={folder}: no readable config.json ({type(error).__name__})") from error
    return max(1, min(longest, LONGEST))
