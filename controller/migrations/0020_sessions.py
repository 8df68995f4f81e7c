import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

# Django's own table, which is used no more: what is in it would still sign people in to consoles of before.
_END_OLD_ONES = """
DO $$ BEGIN
    IF to_regclass('django_session') IS NOT NULL THEN DELETE FROM django_session; END IF;
END $$
"""


class Migration(migrations.Migration):
    """Sessions with their person, use and address; the key is stored as a digest. People sign in again."""

    dependencies = [
        ("controller", "0019_seqs_unsaid"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.CreateModel(
            name="PersonSession",
            fields=[
                ("digest", models.CharField(max_length=64, primary_key=True, serialize=False)),
                ("session_data", models.TextField()),
                ("expire_date", models.DateTimeField(db_index=True)),
                ("started_at", models.DateTimeField()),
                ("used_at", models.DateTimeField()),
                ("address", models.CharField(blank=True, max_length=64)),
                ("browser", models.CharField(blank=True, max_length=200)),
                (
                    "person",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="sessions",
                        to=settings.AUTH_USER_MODEL,
                    ),
                ),
            ],
            options={"db_table": "person_session", "ordering": ["-used_at", "digest"]},
        ),
        migrations.RunSQL(_END_OLD_ONES, migrations.RunSQL.noop),
    ]
