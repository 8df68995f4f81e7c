from django.db import migrations, models


class Migration(migrations.Migration):
    """The bounds of an answer as they were predicted last while it ran. Null takes no space."""

    dependencies = [
        ("controller", "0051_learned_takeovers"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestrecord",
            name="refined_bounds",
            field=models.JSONField(null=True),
        ),
    ]
