"""Work that would slow down the first page view, done at start-up: URLs, views and templates are loaded."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings
from django.template.loader import get_template
from django.urls import get_resolver


def warm() -> int:
    """Uses neither PostgreSQL nor Redis. Returns the number of templates compiled."""
    resolver = get_resolver()
    resolver._populate()  # also what `{% url %}` looks up
    folder = Path(settings.BASE_DIR) / "templates"
    names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*.html"))]
    for name in names:
        get_template(name)
    return len(names)
