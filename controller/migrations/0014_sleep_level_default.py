from django.db import migrations, models


class Migration(migrations.Migration):
    """A default of the database's own: workers of a version that knows of no sleep go on adding instances."""

    dependencies = [
        ("controller", "0013_kv_transfer_id"),
    ]

    operations = [
        migrations.AlterField(
            model_name="instance",
            name="sleep_level",
            field=models.PositiveSmallIntegerField(db_default=0, default=0),
        ),
        migrations.AlterField(
            model_name="scalingpolicy",
            name="sleep_level",
            field=models.PositiveSmallIntegerField(db_default=0, default=0, verbose_name="scale in by sleep"),
        ),
    ]
