from django.db import migrations, models


class Migration(migrations.Migration):
    """One transfer is looked up by its id alone, and the primary key begins with the time."""

    dependencies = [
        ("controller", "0012_role_switch"),
    ]

    operations = [
        migrations.AddIndex(model_name="kvtransfer", index=models.Index(fields=["id"], name="kv_transfer_id")),
    ]
