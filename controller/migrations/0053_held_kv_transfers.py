from django.db import migrations, models


class Migration(migrations.Migration):
    """For how long a KV transfer was held, and whether it was scheduled. Constant defaults rewrite no rows."""

    dependencies = [
        ("controller", "0052_refined_bounds"),
    ]

    operations = [
        migrations.AddField(
            model_name="kvtransfer",
            name="held_s",
            field=models.FloatField(default=0.0, db_default=0.0),
        ),
        migrations.AddField(
            model_name="kvtransfer",
            name="flow",
            field=models.CharField(max_length=40, blank=True, default="", db_default=""),
        ),
    ]
