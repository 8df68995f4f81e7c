"""Real PostgreSQL and Redis from wheels, started once a process and only when a test needs them.

A test that uses pytest-django's `db` gets PostgreSQL; mark `db` gives both servers. Both stop with the session. Under
pytest-xdist each worker has its own two: a test may suspend them, and Redis channels are shared by all its databases.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import pytest
from django.apps import AppConfig, apps
from django.conf import settings
from django.db import connections
from django.db.backends.postgresql.operations import DatabaseOperations
from django.db.models.signals import post_migrate
from django.dispatch import receiver

from tests.limits import pytest_runtest_teardown, pytest_timeout_set_timer, set_limits  # noqa: F401 - hooks
from tests.workers.engine.process import FLEET, EngineProcess, fleet
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis

# Nothing in a test's database must survive the machine.
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}

# What migrations write and no test changes.
NEVER_CHANGED = {"django_content_type", "auth_permission"}
NEEDS_SERVICES = {"db", "transactional_db", "postgres", "redis_server"}
PARTS = "slow|gpu|vllm|browser|torch|fuzz|ray"
ASKED = re.compile(rf"(?<!not )\b({PARTS})\b")  # in an expression of marks
EXCLUDED = re.compile(rf"\bnot ({PARTS})\b")
OF_MODULE = re.compile(rf"^pytestmark = .*\bmark\.({PARTS})\b", re.MULTILINE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """So that `-m "not db"` is all that runs without services, mark what asks for them in another way. Leave out what
    only `THOROUGH=1` runs, unless the command line names it. Begin with long files."""
    for item in items:
        if item.get_closest_marker("django_db") or NEEDS_SERVICES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.db)
    set_limits(items)
    items[:] = longest_first(items)
    named = any("::" in argument for argument in config.invocation_params.args)
    if os.environ.get("THOROUGH") or config.option.keyword or named:
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    left_out += beyond_samples(items, os.environ.get("SAMPLE", ""))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        out = set(left_out)
        items[:] = [item for item in items if item not in out]


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files by the seconds of their mark `long`, then by their number of tests, if any is marked: of two processes that
    share files, none may begin a long one when the other has nothing left to do. pytest-xdist only counts tests."""
    long = {item.path: item.get_closest_marker("long").args[0] for item in items if item.get_closest_marker("long")}  # type: ignore[union-attr]
    tests = Counter(item.path for item in items)
    return sorted(items, key=lambda item: (-long.get(item.path, 0), -tests[item.path])) if long else items


def beyond_samples(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """What `sampled(n)` leaves out: of each such test all cases but `n`, which are others with another seed."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = []
    for each in cases.values():
        each.sort(key=lambda item: hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest())
        left_out += each[int(each[0].get_closest_marker("sampled").args[0]) :]  # type: ignore[union-attr]
    return left_out


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only what may run: reading all modules takes longer than many of the parts' tests.

    Importing torch takes seconds and may not even work: only for those who ask for it (`make test-torch`). Who asks for
    a part (`-m browser`) gets the modules that write this mark themselves. A module that belongs to an excluded part as
    a whole is imported only if the command line names it.
    """
    asked = set(ASKED.findall(config.option.markexpr))
    if not config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    if collection_path.name.startswith("test_torch_") or collection_path.parts[-3:-1] == ("engine", "torch"):
        return None if asked & {"torch", "gpu"} else True
    if collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if asked and not any(f"mark.{part}" in text for part in asked):
        return True
    marks = set(OF_MODULE.findall(text))
    named = any(collection_path.name in argument for argument in config.invocation_params.args)
    return True if marks & set(EXCLUDED.findall(config.option.markexpr)) and not named else None


def pytest_collection_finish() -> None:
    """The collector of garbage need not look at the thousands of tests again and again."""
    gc.collect()
    gc.freeze()


FIGURES: pytest.StashKey[dict[str, object]] = pytest.StashKey()


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> dict[str, object]:
    """For what tests of a real engine or cluster see: printed as the last line, as JSON."""
    return pytestconfig.stash.setdefault(FIGURES, {})


def pytest_unconfigure(config: pytest.Config) -> None:
    if seen := config.stash.get(FIGURES, None):
        print(json.dumps(seen))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests saw (`say` in tests/faults), also of those that passed and of those that other processes ran."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    said = [line for report in reports for name, line in report.user_properties if name == "seen"]
    if said:
        terminalreporter.section("seen")
        terminalreporter.write_line("\n".join(said))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged about a hostile name may hold a lone surrogate, which no worker of xdist can send."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
    return report


@pytest.fixture(scope="session")
def service_dir() -> Path:
    return Path(settings.DATA_DIR)


@pytest.fixture(scope="session")
def postgres(service_dir: Path) -> Iterator[EmbeddedPostgres]:
    """A running PostgreSQL with the empty database `slackline`; pytest-django's tables are in `test_slackline`."""
    server = EmbeddedPostgres(service_dir, options=FAST)
    server.start()
    os.environ["DATABASE_URL"] = server.url
    yield server
    connections.close_all()
    server.stop()


@pytest.fixture(scope="session")
def redis_server(service_dir: Path) -> Iterator[EmbeddedRedis]:
    """A running Redis; settings.REDIS_URL and the channel layer point to it."""
    server = EmbeddedRedis(service_dir)
    server.start()
    os.environ["REDIS_URL"] = settings.REDIS_URL = server.url
    settings.CHANNEL_LAYERS["default"]["CONFIG"]["hosts"] = [server.url]
    yield server
    server.stop()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(postgres: EmbeddedPostgres) -> None:
    """pytest-django asks this before it makes the test database."""
    for where in (settings.DATABASES["default"], connections["default"].settings_dict):
        where |= {"HOST": "127.0.0.1", "PORT": postgres.port}


def delete_rows(operations: DatabaseOperations, style: object, tables: Sequence[str], **options: bool) -> list[str]:
    """Statements that empty the tables, for Django's `flush` after a transactional test.

    TRUNCATE makes new files for every table and index, which takes ten times as long as to delete a test's few rows.
    """
    rows = [f"DELETE FROM {operations.quote_name(table)}" for table in tables if table not in NEVER_CHANGED]
    return ["SET LOCAL session_replication_role = replica", *rows]  # neither foreign keys nor our triggers are checked


@pytest.fixture(scope="session", autouse=True)
def _rows_are_deleted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DatabaseOperations, "sql_flush", delete_rows)
        yield


@receiver(post_migrate, dispatch_uid="rows that migrations made")
def rows_that_migrations_made(sender: AppConfig, **signal: object) -> None:
    """Create the roles and the configuration's version where they are missing.

    A transactional test ends with Django's `flush`, which also empties what migrations filled and then sends this
    signal. Without it, tests that run after a transactional one would start with another database than the first test.
    """
    if sender.label == "controller":
        import_module("controller.migrations.0002_partitions_triggers_roles").create_roles(apps, None)
        apps.get_model("controller", "ConfigVersion").objects.get_or_create(pk=1, defaults={"version": 1})


@pytest.fixture
def fleet_token(monkeypatch: pytest.MonkeyPatch) -> str:
    """What the fleet's processes show each other; this process has it in its environment."""
    monkeypatch.setenv("FLEET_TOKEN", FLEET["token"])
    return FLEET["token"]


@pytest.fixture
def unsent_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments are stored and no worker hears of them."""
    monkeypatch.setattr("workers.experiments.runner.send_experiment", lambda message: None)


@pytest.fixture(scope="module")
def engines(engine_options: dict[str, Sequence[str]]) -> Iterator[dict[str, EngineProcess]]:
    """Reference engines that trust each other, one for each name in the module's fixture `engine_options`."""
    with fleet(**engine_options) as started:
        yield started


@pytest.fixture(autouse=True)
def _servers_of_marked_tests(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("db"):
        request.getfixturevalue("postgres")
        request.getfixturevalue("redis_server")
