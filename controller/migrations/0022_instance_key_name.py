from django.db import migrations, models


class Migration(migrations.Migration):
    """Which key a registered server asks for. The key itself is with gateways and workers."""

    dependencies = [
        ("controller", "0021_service_accounts"),
    ]

    operations = [
        migrations.AddField(
            model_name="instance",
            name="key_name",
            field=models.CharField(
                blank=True, db_default="", default="", max_length=64, verbose_name="name of its key"
            ),
        ),
    ]
