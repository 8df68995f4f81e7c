"""A real worker and beat whose child `kill -9` ends as it trains: the old version stays, the next beat trains."""

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

from api.openai.state.graph_sets import GraphSets
from api.openai.state.length_forests import LengthForests
from controller.models import GraphVersion, LengthVersion
from controller.predict.answer_lengths import PublishedVersion
from controller.selectors.records.graph_versions import published_graph_content, published_graphs
from controller.selectors.records.length_versions import published_content, published_versions
from tests import factories
from tests.api.openai.state.test_length_forests import Store
from tests.waiting import until
from tests.workers.analysis.test_graph_versions import stored as workflows_stored
from tests.workers.analysis.test_length_versions import stored
from workers import live
from workers.analysis.graph_versions import train_tenants
from workers.analysis.length_versions import train_models
from workers.supervisor.plan import ROOT

pytestmark = [pytest.mark.db, pytest.mark.slow, pytest.mark.django_db(transaction=True)]

# The worker as `make up` starts it, with a beat of its own that knows one task, each second. Where the folder asks for
# it, its child stops itself in the middle of the fit (a tree, or a workflow's graph), or after a version's row is
# written and before it is committed.
WORKER = """
import os, signal, sys, django
django.setup()
from sklearn.tree._classes import BaseDecisionTree
from controller.predict import pattern_graphs
from controller.services.records import learned_versions
from workers.celery import app
from workers.tasks import names

folder, task, fitted = sys.argv[1], getattr(names, sys.argv[2]), 0

def stands(moment):
    if os.path.exists(f"{folder}/{moment}"):
        os.unlink(f"{folder}/{moment}")
        with open(f"{folder}/new", "w") as note:
            note.write(f"{moment} {os.getpid()}")
        os.rename(f"{folder}/new", f"{folder}/stands")
        os.kill(os.getpid(), signal.SIGSTOP)

def middle():
    global fitted
    fitted += 1
    if fitted == 6:
        stands("fit")

def fit(tree, *told, _fit=BaseDecisionTree._fit, **more):
    middle()
    return _fit(tree, *told, **more)

def graph_of(calls, _made=pattern_graphs.graph_of):
    middle()
    return _made(calls)

def drop(*, _drop=learned_versions.takeovers_drop, **told):
    stands("store")
    return _drop(**told)

BaseDecisionTree._fit, learned_versions.takeovers_drop, pattern_graphs.graph_of = fit, drop, graph_of
app.conf.beat_schedule = {"trains": {"task": task, "schedule": 1.0, "options": {"expires": 10.0}}}
app.worker_main([
    *("worker", "-P", "prefork", "-c", "1", "-Q", "analysis", "-B", "-s", f"{folder}/beat", "-l", "INFO"),
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
])
"""


@pytest.fixture
def worker(tmp_path: Path, trains: Trains) -> Iterator[subprocess.Popen[bytes]]:
    info = connection.get_connection_params()
    told = {"DATABASE_URL": f"postgresql://{info['user']}@{info['host']}:{info['port']}/{info['dbname']}"}
    told |= {"REDIS_URL": settings.REDIS_URL, "DATA_DIR": str(settings.DATA_DIR), "SLACKLINE_ROLE": "worker"}
    told |= {"DJANGO_SETTINGS_MODULE": "console.settings", "CELERY_SKIP_CHECKS": "1"}
    command = [sys.executable, "-c", WORKER, str(tmp_path), trains.task]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **told}, cwd=ROOT, stdout=log, stderr=log)
    yield process
    process.terminate()
    try:
        process.wait(60)  # it ends what it fits, which has seconds to do
    finally:
        process.kill()
        live._client(settings.REDIS_URL).delete("analysis")


class Forests:
    """Forests of one model, and what a gateway makes of those that are published."""

    task, rows = "LENGTHS", LengthVersion

    def __init__(self) -> None:
        self.store = Store()
        self.forests = LengthForests(self.store, lambda found: None, self.store.note)

    def recorded(self) -> None:
        """Enough for one version, which is made, and then for another."""
        model = factories.served_model(name="demo", context_tokens=100_000)
        stored(model, 800)
        train_models()
        LengthVersion.objects.update(trained_at=timezone.now() - timedelta(hours=1))
        stored(model, 1_400, seed=1, later=1_000)

    def in_force(self) -> int:
        self.store.versions = list(published_versions())
        for each in self.store.versions:
            self.store.contents[each.version] = published_content("demo", each.version) or b""
        asyncio.run(self.forests.poll())
        assert not self.forests.refused
        return self.forests.used["demo"].version

    def whole(self) -> bool:
        newest = LengthVersion.objects.get(version=2)
        return (newest.refused, newest.answers + newest.judged) == ("", 2_200)


class Graphs:
    """The same of the graphs of one tenant."""

    task, rows = "GRAPHS", GraphVersion

    def __init__(self) -> None:
        self.sets = GraphSets(self, lambda found: None, lambda outcomes: None)

    def graph_versions(self) -> list[PublishedVersion]:
        return self.published

    def graph_content(self, tenant: str, version: int) -> bytes | None:
        return self.contents[version]

    def recorded(self) -> None:
        workflows_stored(40)
        train_tenants()
        GraphVersion.objects.update(trained_at=timezone.now() - timedelta(hours=1))
        workflows_stored(60, seed=1, ago_s=2_000.0)

    def in_force(self) -> int:
        self.published = list(published_graphs())
        self.contents = {each.version: published_graph_content("acme", each.version) for each in self.published}
        asyncio.run(self.sets.poll())
        assert not self.sets.refused
        return self.sets.used["acme"].version

    def whole(self) -> bool:
        newest = GraphVersion.objects.get(version=2)
        return (newest.refused, newest.workflows + newest.judged) == ("", 100)


Trains = Forests | Graphs


@pytest.fixture(params=[Forests, Graphs])
def trains(request: pytest.FixtureRequest) -> Trains:
    made: Trains = request.param()
    return made


def test_a_trainer_killed_while_it_fits_or_stores_leaves_the_old_version_and_the_next_beat_trains(
    tmp_path: Path, trains: Trains, request: pytest.FixtureRequest
) -> None:
    trains.recorded()
    assert trains.in_force() == 1
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
        assert [row.version for row in trains.rows.objects.all()] == [trains.in_force()] == [1]
    until(lambda: trains.rows.objects.count() == 2, 60, what=(tmp_path / "log").read_text)
    assert trains.in_force() == 2
    assert trains.whole()
    assert len({process.pid, *map(int, killed)}) == 3
    assert process.poll() is None, "the worker itself went on"
