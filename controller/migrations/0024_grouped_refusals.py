from django.db import migrations, models


class Migration(migrations.Migration):
    """Refusals that came faster than a rate are stored as one record. Earlier records stand for one request each."""

    dependencies = [
        ("controller", "0023_tenant_entitlements"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestrecord",
            name="stands_for",
            field=models.IntegerField(db_default=1, default=1),
        ),
        migrations.AddField(
            model_name="requestrecord",
            name="last_arrived_at",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="requestrecord",
            name="all_prompt_tokens",
            field=models.BigIntegerField(null=True),
        ),
    ]
