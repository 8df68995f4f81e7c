from django.db import migrations, models


class Migration(migrations.Migration):
    """How a client named the step that a request is, and those that it depends on. Earlier records have neither."""

    dependencies = [
        ("controller", "0044_thinking_deadlines"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestrecord",
            name="step_key",
            field=models.CharField(blank=True, db_default="", default="", max_length=120),
        ),
        migrations.AddField(
            model_name="requestrecord",
            name="parents",
            field=models.JSONField(null=True),
        ),
    ]
