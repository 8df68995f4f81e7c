"""The schedule and the tasks agree, and nothing on it can pile up or run without end."""

import pytest
from celery.fixups.django import DjangoWorkerFixup

from workers.celery import app
from workers.tasks.names import HEARTBEAT, TASK_MODULES

QUEUES = {"control", "actions", "analysis", "pruning"}


@pytest.fixture(scope="module", autouse=True)
def tasks():
    app.loader.import_default_modules()
    return app.tasks


@pytest.mark.parametrize("entry", app.conf.beat_schedule.values(), ids=app.conf.beat_schedule)
def test_scheduled_tasks_exist_expire_and_are_limited(entry, tasks):
    task = tasks[entry["task"]]
    assert entry["options"]["expires"] <= 2 * entry["schedule"]
    soft, hard = task.soft_time_limit or app.conf.task_soft_time_limit, task.time_limit or app.conf.task_time_limit
    assert soft < hard
    assert app.amqp.router.route({}, entry["task"])["queue"].name in QUEUES


def test_every_task_of_ours_is_scheduled(tasks):
    ours = {
        name for name, task in tasks.items() if type(task).__module__ in TASK_MODULES or task.__module__ in TASK_MODULES
    }
    assert ours == {entry["task"] for entry in app.conf.beat_schedule.values()}
    assert HEARTBEAT in ours


def test_outages_of_any_length_are_survived():
    assert app.conf.broker_connection_max_retries is None
    assert app.conf.task_ignore_result
    assert not app.conf.task_acks_late


def test_a_worker_does_not_import_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django's checks would, which takes each worker seconds and 20 MB."""

    def imports_the_pages() -> None:
        raise AssertionError("checks run")

    monkeypatch.setattr("django.core.checks.run_checks", imports_the_pages)
    DjangoWorkerFixup(app).validate_models()
