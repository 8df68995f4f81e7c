"""Sessions of people who are signed in to the console."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class PersonSession(models.Model):
    """One sign-in of one browser. `digest`: SHA-256 (hex) of the key in the browser's cookie, which is not stored, so
    that nobody can sign in with a copy of this table. `expire_date` moves with use."""

    digest = models.CharField(primary_key=True, max_length=64)
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.CASCADE, related_name="sessions"
    )
    session_data = models.TextField()
    expire_date = models.DateTimeField(db_index=True)
    started_at = models.DateTimeField()
    used_at = models.DateTimeField()
    address = models.CharField(max_length=64, blank=True)
    browser = models.CharField(max_length=200, blank=True)

    class Meta:
        db_table = "person_session"
        ordering = ["-used_at", "digest"]

    def __str__(self) -> str:
        return f"session {self.digest[:8]}"
