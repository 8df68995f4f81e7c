from django.db import migrations, models

KINDS = ["weights_load", "first_served", "sleep", "wake", "role_switch"]


class Migration(migrations.Migration):
    dependencies = [
        ("controller", "0011_links"),
    ]

    operations = [
        migrations.AlterField(
            model_name="action",
            name="kind",
            field=models.CharField(
                choices=[
                    ("weights_load", "Load weights"),
                    ("first_served", "Wait for the first served request"),
                    ("sleep", "Fall asleep"),
                    ("wake", "Wake up"),
                    ("role_switch", "Switch role"),
                ],
                max_length=32,
            ),
        ),
        migrations.RemoveConstraint(model_name="action", name="action_kind_known"),
        migrations.AddConstraint(
            model_name="action",
            constraint=models.CheckConstraint(condition=models.Q(("kind__in", KINDS)), name="action_kind_known"),
        ),
    ]
