from django.db import migrations, models


class Migration(migrations.Migration):
    """Thinking deadlines of requests, and when the first token came that was not reasoning. Earlier records have
    neither."""

    dependencies = [
        ("controller", "0043_graph_versions"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestrecord",
            name="target_thinking_s",
            field=models.FloatField(null=True),
        ),
        migrations.AddField(
            model_name="requestrecord",
            name="first_answer_s",
            field=models.FloatField(null=True),
        ),
        migrations.AddField(
            model_name="requestrecord",
            name="reasoning_tokens",
            field=models.IntegerField(db_default=0, default=0),
        ),
    ]
