"""A real worker and beat whose child is ended by `kill -9` as it trains: the old forest stays, the next beat trains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.db import connection
from django.utils import timezone

from api.openai.state.length_forests import LengthForests
from controller.models import LengthVersion
from controller.selectors.records.length_versions import published_content, published_versions
from tests import factories
from tests.api.openai.state.test_length_forests import Store
from tests.waiting import until
from tests.workers.analysis.test_length_versions import stored
from workers import live
from workers.analysis.length_versions import train_models
from workers.supervisor.plan import ROOT

pytestmark = [pytest.mark.db, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

# The worker as `make up` starts it, with a beat of its own that knows one task, each second. Where the folder asks for
# it, its child stops itself in the middle of the fit, or after a version's row is written and before it is committed.
WORKER = """
import os, signal, sys, django
django.setup()
from sklearn.tree._classes import BaseDecisionTree
from controller.services.records import learned_versions
from workers.celery import app
from workers.tasks.names import LENGTHS

folder, fitted = sys.argv[1], 0

def stands(moment):
    if os.path.exists(f"{folder}/{moment}"):
        os.unlink(f"{folder}/{moment}")
        with open(f"{folder}/new", "w") as note:
            note.write(f"{moment} {os.getpid()}")
        os.rename(f"{folder}/new", f"{folder}/stands")
        os.kill(os.getpid(), signal.SIGSTOP)

def fit(tree, *told, _fit=BaseDecisionTree._fit, **more):
    global fitted
    fitted += 1
    if fitted == 6:
        stands("fit")
    return _fit(tree, *told, **more)

def drop(*, _drop=learned_versions.takeovers_drop, **told):
    stands("store")
    return _drop(**told)

BaseDecisionTree._fit, learned_versions.takeovers_drop = fit, drop
app.conf.beat_schedule = {"lengths": {"task": LENGTHS, "schedule": 1.0, "options": {"expires": 10.0}}}
app.worker_main([
    *("worker", "-P", "prefork", "-c", "1", "-Q", "analysis", "-B", "-s", f"{folder}/beat", "-l", "INFO"),
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
])
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    info = connection.get_connection_params()
    told = {"DATABASE_URL": f"postgresql://{info['user']}@{info['host']}:{info['port']}/{info['dbname']}"}
    told |= {"REDIS_URL": settings.REDIS_URL, "DATA_DIR": str(settings.DATA_DIR), "SLACKLINE_ROLE": "worker"}
    told |= {"DJANGO_SETTINGS_MODULE": "console.settings", "CELERY_SKIP_CHECKS": "1"}
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **told}, cwd=ROOT, stdout=log, stderr=log)
    yield process
    process.terminate()
    try:
        process.wait(60)  # it ends what it fits, which has seconds to do
    finally:
        process.kill()
        live._client(settings.REDIS_URL).delete("analysis")


class Gateway:
    """What a gateway makes of what is published."""

    def __init__(self) -> None:
        self.store = Store()
        self.forests = LengthForests(self.store, lambda found: None, self.store.note)

    def in_force(self) -> int:
        self.store.versions = list(published_versions())
        for each in self.store.versions:
            self.store.contents[each.version] = published_content("demo", each.version) or b""
        asyncio.run(self.forests.poll())
        assert not self.forests.refused
        return self.forests.used["demo"].version


def test_a_trainer_killed_while_it_fits_or_stores_leaves_the_old_forest_and_the_next_beat_trains(tmp_path, request):
    model = factories.served_model(name="demo", context_tokens=100_000)
    stored(model, 800)
    train_models()
    LengthVersion.objects.update(trained_at=timezone.now() - timedelta(hours=1))
    stored(model, 1_400, seed=1, later=1_000)
    gateway = Gateway()
    assert gateway.in_force() == 1
    (tmp_path / "fit").touch()
    process, killed = request.getfixturevalue("worker"), []
    for moment, then in (("fit", "store"), ("store", None)):
        stands = tmp_path / "stands"
        until(stands.exists, 60, what=(tmp_path / "log").read_text)
        found, pid = stands.read_text().split()
        assert found == moment
        if then:
            (tmp_path / then).touch()
        stands.unlink()
        os.kill(int(pid), signal.SIGKILL)
        killed.append(pid)
        assert [row.version for row in LengthVersion.objects.all()] == [gateway.in_force()] == [1]
    until(lambda: LengthVersion.objects.count() == 2, 60, what=(tmp_path / "log").read_text)
    assert gateway.in_force() == 2
    newest = LengthVersion.objects.get(version=2)
    assert (newest.refused, newest.answers + newest.judged) == ("", 2_200)
    assert len({process.pid, *map(int, killed)}) == 3
    assert process.poll() is None, "the worker itself went on"
