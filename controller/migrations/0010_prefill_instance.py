from django.db import migrations, models


class Migration(migrations.Migration):
    """Defaults of the database's own: gateways of the version before go on writing."""

    dependencies = [
        ("controller", "0009_sleep"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestrecord",
            name="prefill_instance",
            field=models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        migrations.AddField(
            model_name="requestrecord",
            name="may_defer",
            field=models.BooleanField(db_default=False, default=False),
        ),
        migrations.AddIndex(
            model_name="requestrecord",
            index=models.Index(
                condition=models.Q(("prefill_instance", ""), _negated=True),
                fields=["prefill_instance", "arrived_at"],
                name="request_record_prefill",
            ),
        ),
    ]
