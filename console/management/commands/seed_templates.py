"""`manage.py seed_templates`: store the launch templates that come with Slackline. Existing ones, changed or not, are
kept, and one that a person removed stays removed."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from controller.services.fleet.launch_templates import shipped_templates_store


class Command(BaseCommand):
    """Idempotent: `make up` and the image's role `migrate` run it at each start."""

    help = "Store the launch templates that come with Slackline."

    def handle(self, *args: Any, **options: Any) -> None:
        new = shipped_templates_store()
        self.stdout.write(f"Stored {new} launch template{'' if new == 1 else 's'}.")
