from django.db import migrations, models

KINDS = ["weights_load", "first_served", "sleep", "wake"]
WEIGHTS = ["present", "loading", "absent", "leaving", "asleep", "waking"]


class Migration(migrations.Migration):
    dependencies = [
        ("controller", "0008_transfers"),
    ]

    operations = [
        migrations.AddField(
            model_name="instance", name="sleep_level", field=models.PositiveSmallIntegerField(default=0)
        ),
        migrations.AddField(
            model_name="scalingpolicy",
            name="sleep_level",
            field=models.PositiveSmallIntegerField(default=0, verbose_name="scale in by sleep"),
        ),
        migrations.AlterField(
            model_name="action",
            name="kind",
            field=models.CharField(
                choices=[
                    ("weights_load", "Load weights"),
                    ("first_served", "Wait for the first served request"),
                    ("sleep", "Fall asleep"),
                    ("wake", "Wake up"),
                ],
                max_length=32,
            ),
        ),
        migrations.AlterField(
            model_name="instance",
            name="weights",
            field=models.CharField(
                choices=[
                    ("present", "Present"),
                    ("loading", "Loading"),
                    ("absent", "Absent"),
                    ("leaving", "Falling asleep"),
                    ("asleep", "Asleep"),
                    ("waking", "Waking up"),
                ],
                default="present",
                max_length=16,
            ),
        ),
        migrations.RemoveConstraint(model_name="action", name="action_kind_known"),
        migrations.RemoveConstraint(model_name="instance", name="instance_weights_known"),
        migrations.AddConstraint(
            model_name="action",
            constraint=models.CheckConstraint(condition=models.Q(("kind__in", KINDS)), name="action_kind_known"),
        ),
        migrations.AddConstraint(
            model_name="instance",
            constraint=models.CheckConstraint(
                condition=models.Q(("weights__in", WEIGHTS)), name="instance_weights_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="instance",
            constraint=models.CheckConstraint(
                condition=models.Q(("sleep_level__in", [0, 1, 2])), name="instance_sleep_level_known"
            ),
        ),
        migrations.AddConstraint(
            model_name="scalingpolicy",
            constraint=models.CheckConstraint(
                condition=models.Q(("sleep_level__in", [0, 1, 2])), name="scaling_policy_sleep_level"
            ),
        ),
    ]
