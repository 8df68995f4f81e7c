from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("controller", "0047_tool_steps"),
    ]

    operations = [
        migrations.AddField(
            model_name="lengthversion",
            name="coverage_by_tokens",
            field=models.JSONField(db_default=[], default=list),
        ),
    ]
