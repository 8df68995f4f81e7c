"""Old decisions of jobs may be deleted by the retention task, and by nothing else; those of people never are."""

from django.db import migrations

FUNCTION = """
CREATE OR REPLACE FUNCTION decision_append_only() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    {exception}RAISE EXCEPTION 'decisions are append-only: % refused', TG_OP USING ERRCODE = 'restrict_violation';
END
$body$;
"""
EXCEPTION = """IF TG_OP = 'DELETE' AND current_setting('slackline.retention', true) = 'on'
        AND OLD.actor_type <> 'person' AND OLD.at < now() - interval '30 days' THEN
        RETURN OLD;
    END IF;
    """


class Migration(migrations.Migration):
    dependencies = [
        ("controller", "0014_sleep_level_default"),
    ]

    operations = [
        migrations.RunSQL(FUNCTION.format(exception=EXCEPTION), FUNCTION.format(exception="")),
    ]
