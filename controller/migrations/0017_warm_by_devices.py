from django.db import migrations, models


class Migration(migrations.Migration):
    """How many instances are kept warm may be left to the devices; policies that are there keep what they say."""

    dependencies = [
        ("controller", "0016_tokenizer"),
    ]

    operations = [
        migrations.AlterField(
            model_name="scalingpolicy",
            name="warm",
            field=models.PositiveIntegerField(blank=True, null=True, verbose_name="warm instances kept beside"),
        ),
    ]
