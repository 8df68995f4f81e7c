from django.db import migrations, models


class Migration(migrations.Migration):
    """Where a model's tokenizer lies. The database's own default, for processes of a version that knows of none."""

    dependencies = [
        ("controller", "0015_decision_retention"),
    ]

    operations = [
        migrations.AddField(
            model_name="servedmodel",
            name="tokenizer",
            field=models.CharField(blank=True, db_default="", default="", max_length=500),
        ),
    ]
