from typing import Any

from django.db import migrations, models
from django.db.models import OuterRef, Q, Subquery
from django.db.models.functions import Coalesce


def from_first_interval(apps: Any, schema_editor: Any) -> None:
    """Provisioned time is kept by role from the first sign of life, so its first interval has the role of the start.
    One that nobody has started yet says nothing; an endpoint was started before it was registered."""
    instances = apps.get_model("controller", "Instance").objects
    intervals = apps.get_model("controller", "InstanceInterval").objects
    first = intervals.filter(instance=OuterRef("pk")).order_by("started_at", "pk")
    began = instances.filter(Q(intervals__isnull=False) | Q(provisioner="static"))
    instances.filter(pk__in=began.values("pk")).update(
        started_role=Coalesce(Subquery(first.values("role")[:1]), "role")
    )


class Migration(migrations.Migration):
    """The role that an engine was started in, which a role given later leaves as it is."""

    dependencies = [
        ("controller", "0017_warm_by_devices"),
    ]

    operations = [
        migrations.AddField(
            model_name="instance",
            name="started_role",
            field=models.CharField(
                blank=True,
                choices=[("collocated", "Prefill and decode"), ("prefill", "Prefill"), ("decode", "Decode")],
                db_default="",
                default="",
                max_length=16,
            ),
        ),
        migrations.RunPython(from_first_interval, migrations.RunPython.noop),
    ]
