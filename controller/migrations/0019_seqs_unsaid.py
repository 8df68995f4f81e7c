from typing import Any

from django.db import migrations, models

UNSAID_SEQS = 32


def of_registered_ones(apps: Any, schema_editor: Any) -> None:
    """Until now an endpoint with the default number was taken as registered without one."""
    instances = apps.get_model("controller", "Instance").objects
    instances.filter(provisioner="static", max_num_seqs=UNSAID_SEQS).update(seqs_unsaid=True)


class Migration(migrations.Migration):
    """Whether somebody said how many sequences an endpoint runs at once. The number stays, for gateways of before."""

    dependencies = [
        ("controller", "0018_started_role"),
    ]

    operations = [
        migrations.AddField(
            model_name="instance",
            name="seqs_unsaid",
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.RunPython(of_registered_ones, migrations.RunPython.noop),
    ]
