"""Every backend can be chosen by its name, in the control API, the console and `manage.py register_instances`."""

from __future__ import annotations

from controller.services.fleet.launch_templates import BACKENDS as STARTED
from controller.wording.values import BACKEND_NAMES
from workers.backends.registry import BACKENDS

FOR_TESTS = {"fake"}


def test_every_backend_has_a_name_under_which_people_choose_it():
    assert set(BACKENDS) - FOR_TESTS == set(BACKEND_NAMES)
    assert set(STARTED) <= set(BACKEND_NAMES)
