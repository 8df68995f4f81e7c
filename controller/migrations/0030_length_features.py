from django.db import migrations, models


class Migration(migrations.Migration):
    """What the length of an answer was predicted from, and its bounds. Earlier records have neither."""

    dependencies = [
        ("controller", "0029_scale_by_hand"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestrecord",
            name="length_features",
            field=models.JSONField(db_default=[], default=list),
        ),
        migrations.AddField(
            model_name="requestrecord",
            name="length_bounds",
            field=models.JSONField(db_default=[], default=list),
        ),
        migrations.AddField(
            model_name="requestrecord",
            name="length_version",
            field=models.IntegerField(null=True),
        ),
    ]
