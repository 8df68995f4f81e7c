"""The console's start compiles every template and resolves every address, without asking a server."""

from __future__ import annotations

from django.template import engines
from django.urls import reverse

from console.warm_up import warm


def test_every_template_compiles_and_stays_compiled():
    assert warm() >= 30
    (loader,) = engines["django"].engine.template_loaders
    assert any("overview.html" in str(key) for key in loader.get_template_cache)
    assert reverse("overview") == "/"
