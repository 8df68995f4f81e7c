"""What became of the looks at provisioners, for pages and the API."""

from __future__ import annotations

from django.utils import timezone

from controller.models import ProvisionerLook


def provisioner_looked(*, name: str, instances: int | None, error: str = "") -> None:
    """Store the outcome of a look. `instances`: how many it has; None: it could not be seen, because of `error`."""
    now = timezone.now()
    if instances is not None:
        seen = {"seen_at": now, "failing_since": None, "error": "", "instances": instances}
        ProvisionerLook.objects.update_or_create(name=name, defaults=seen)
        return
    row, _ = ProvisionerLook.objects.get_or_create(name=name)
    row.failing_since, row.error = row.failing_since or now, error
    row.save(update_fields=["failing_since", "error"])
