"""The Django application that holds the models. The pure half below `controller/` does not know of it."""

from __future__ import annotations

from django.apps import AppConfig


class ControllerConfig(AppConfig):
    """Models, services, selectors and admin of the control plane."""

    name = "controller"
    verbose_name = "Slackline"
