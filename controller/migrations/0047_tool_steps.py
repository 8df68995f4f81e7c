from django.db import migrations, models


class Migration(migrations.Migration):
    """Tool steps that clients reported, in the record of the next request of their workflow."""

    dependencies = [
        ("controller", "0046_left_workflow_results"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestrecord",
            name="tool_steps",
            field=models.JSONField(db_default=[], default=list),
        ),
    ]
