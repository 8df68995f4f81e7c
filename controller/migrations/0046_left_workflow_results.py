from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("controller", "0045_parents_of_steps"),
    ]

    operations = [
        migrations.AddIndex(
            model_name="workflowresult",
            index=models.Index(
                condition=models.Q(("latest", False)), fields=["tenant", "workflow"], name="workflow_result_left"
            ),
        ),
    ]
