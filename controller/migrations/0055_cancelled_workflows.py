"""When a workflow was cancelled. PostgreSQL derives three columns from it anew: a generated column cannot be changed, so
each is dropped and made again, which rewrites the table and leaves the rows of before with what they said."""

from django.db import migrations, models
from django.db.models import Case, F, Q, Value, When
from django.db.models.functions import Coalesce, Least

BY_NOBODY = Q(cancelled_by="")
TOO_LATE = Q(cancelled_at__gte=F("due_at"))
IN_TIME = (BY_NOBODY | TOO_LATE) & (
    Q(due_at__isnull=True, missed=0, cancelled__lt=F("requests")) | Q(failed=0, ended_at__lte=F("due_at"))
)
CANCELLED = Q(cancelled_by="tenant") | BY_NOBODY & Q(due_at__isnull=True, cancelled=F("requests"))
ENDS_AT = Case(
    When(BY_NOBODY, then=Coalesce("due_at", "ended_at")),
    default=Least("due_at", Coalesce("cancelled_at", "ended_at")),
)


def _whether(*cases: When) -> models.GeneratedField:
    return models.GeneratedField(
        expression=Case(*cases, default=Value(False)), output_field=models.BooleanField(), db_persist=True
    )


class Migration(migrations.Migration):
    dependencies = [
        ("controller", "0054_names_in_the_admin_site"),
    ]

    operations = [
        migrations.RemoveIndex(model_name="workflowresult", name="workflow_result_ends"),
        migrations.RemoveField(model_name="workflowresult", name="ends_at"),
        migrations.RemoveField(model_name="workflowresult", name="in_time"),
        migrations.RemoveField(model_name="workflowresult", name="excluded"),
        migrations.AddField(model_name="workflowresult", name="cancelled_at", field=models.DateTimeField(null=True)),
        migrations.AddField(
            model_name="workflowresult",
            name="ends_at",
            field=models.GeneratedField(expression=ENDS_AT, output_field=models.DateTimeField(), db_persist=True),
        ),
        migrations.AddField(
            model_name="workflowresult",
            name="in_time",
            field=_whether(When(IN_TIME, then=Value(True))),
        ),
        migrations.AddField(
            model_name="workflowresult",
            name="excluded",
            field=_whether(When(TOO_LATE, then=Value(False)), When(CANCELLED, then=Value(True))),
        ),
        migrations.AddIndex(
            model_name="workflowresult",
            index=models.Index(
                fields=["ends_at"],
                include=["tenant", "slo_class", "in_time", "excluded", "tokens"],
                name="workflow_result_ends",
            ),
        ),
    ]
