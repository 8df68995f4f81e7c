"""After a form has changed the configuration: notify the gateways and redirect to the list."""

from __future__ import annotations

from django.http import HttpResponseRedirect
from django.shortcuts import redirect

from workers.notices import announce_config


def saved(page: str) -> HttpResponseRedirect:
    announce_config()
    return redirect(page)
