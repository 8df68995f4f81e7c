"""What the documents say exists, and what exists is in the documents: settings, options, metrics, policies, links."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import controller.policies.admission
import controller.policies.ordering
import controller.policies.routing  # noqa: F401  (importing registers the policies)
from api.openai.state.instruments import Instruments
from console.metrics import REGISTRY
from controller.core.policy import ADMISSIONS, ORDERINGS, ROUTINGS
from controller.core.process_spec import SAYABLE
from controller.dispatch import MIGRATIONS, POLICY_SETS
from controller.dispatch.config import DispatchConfig
from controller.dispatch.disaggregation.transfers import MigratorConfig
from controller.dispatch.pacing import PACINGS
from controller.policies.batching import BATCHINGS
from controller.policies.preemption import PREEMPTIONS
from workers.engine.config import build_parser

ROOT = Path(__file__).resolve().parent.parent
OPERATIONS = ROOT / "docs/operations.md"
CATALOGUE = ROOT / "controller/policies/README.md"
DOCUMENTS = (ROOT / "README.md", CATALOGUE, *sorted((ROOT / "docs").glob("*.md")))
SCREENSHOTS = "docs/screenshots/"
READERS = {"text", "choice", "flag", "number", "whole", "names", "mapping", "url", "database", "secret"}
NOT_OURS = {"PYTHON", "VENV"}  # variables of make itself
GATEWAY_GAUGES = ("api/openai/state/status.py", "api/openai/service.py")
CONSOLE_GAUGES = "console/views/metrics.py"


def first_cells(document: Path, pattern: str) -> set[str]:
    """Names in backquotes in the first column of the document's tables."""
    rows = [line.split("|")[1] for line in document.read_text().splitlines() if line.startswith("|")]
    return {name for cell in rows for name in re.findall(rf"`({pattern})`", cell)}


def django_settings() -> set[str]:
    tree = ast.parse((ROOT / "console/settings.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    ours = [call for call in calls if getattr(call.func.value, "id", "") == "_env" and call.func.attr in READERS]
    return {call.args[0].value for call in ours if isinstance(call.args[0], ast.Constant)}


def supervisor_settings() -> set[str]:
    text = (ROOT / "workers/supervisor/settings.py").read_text()
    return set(re.findall(r'(?:environ\.get\(|environ, |environ\[)"([A-Z_]+)"', text))


def image_settings() -> set[str]:
    entry = re.findall(r"\$\{([A-Z_]+):-", (ROOT / "docker/entrypoint.sh").read_text())
    return {*entry, *re.findall(r"(?m)^([A-Z_]+)=", (ROOT / "docker/env.example").read_text())}


def test_readers_are_all_known():
    tree = ast.parse((ROOT / "console/environment.py").read_text())
    [reader] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    public = {f.name for f in reader.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")}
    assert public == READERS


@pytest.mark.parametrize("found", [django_settings, supervisor_settings, image_settings])
def test_every_setting_is_in_operations(found):
    settings = found()
    assert len(settings) >= 2
    assert settings - first_cells(OPERATIONS, "[A-Z_]+") == set()


def test_operations_names_no_setting_that_does_not_exist():
    real = django_settings() | supervisor_settings() | image_settings() | NOT_OURS
    assert first_cells(OPERATIONS, "[A-Z][A-Z_]+") - real == set()


def test_every_engine_option_is_in_operations():
    options = {option for action in build_parser()._actions for option in action.option_strings}
    wanted = {option for option in options if option.startswith("--")} - {"--help", "--no-enable-prefix-caching"}
    assert wanted - first_cells(OPERATIONS, "--[a-z-]+") == set()


@pytest.mark.parametrize("program", ["api/openai/__main__.py", "workers/demo_load.py"])
def test_every_option_of_other_processes_is_in_operations(program):
    options = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (ROOT / program).read_text()))
    assert len(options) >= 3
    assert options - first_cells(OPERATIONS, "--[a-z-]+") == set()


@pytest.mark.parametrize("settings", [DispatchConfig, MigratorConfig])
def test_every_dispatch_setting_is_in_operations(settings):
    assert set(settings.__dataclass_fields__) - first_cells(OPERATIONS, "[a-z0-9_]+") == set()


def gauges(path: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / path).read_text()))


def exposed(metrics: Iterator) -> set[str]:
    return {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in metrics}


def test_every_metric_is_in_operations():
    names = exposed(Instruments().registry.collect()) | exposed(REGISTRY.collect())
    for path in GATEWAY_GAUGES:
        found = gauges(path, r'(?m)^\s*(?:yield )?\(?"([a-z_]+)",')
        assert len(found) >= 2, f"{path}: no gauges found; has their form changed?"
        names |= {f"slackline_{name}" for name in found}
    names |= gauges(CONSOLE_GAUGES, r'GaugeMetricFamily\(\s*"([a-z_]+)"')
    assert len(names) > 30
    assert names - first_cells(OPERATIONS, "[a-z0-9_]+") == set()


@pytest.mark.parametrize(
    "registered",
    [ORDERINGS, ADMISSIONS, ROUTINGS, PACINGS, MIGRATIONS, BATCHINGS, PREEMPTIONS, POLICY_SETS],
    ids=["orderings", "admissions", "routings", "pacings", "migrations", "batchings", "preemptions", "policy sets"],
)
def test_every_registered_policy_is_in_the_catalogue(registered):
    assert set(registered) - first_cells(CATALOGUE, "[a-z0-9_]+") == set()


def test_the_catalogue_names_no_policy_that_is_not_registered():
    registered = {*ORDERINGS, *ADMISSIONS, *ROUTINGS, *PACINGS, *MIGRATIONS, *BATCHINGS, *PREEMPTIONS, *POLICY_SETS}
    assert first_cells(CATALOGUE, "[a-z0-9_]+") - registered == set()


def make_targets() -> set[str]:
    return set(re.findall(r"(?m)^([a-z%-]+):.*## ", (ROOT / "Makefile").read_text()))


def commands(text: str) -> set[str]:
    """`make x` in backquotes or at the start of a line of code."""
    return {name.rstrip("-") for name in re.findall(r"(?:`|^|, `)make ([a-z][a-z-]*)", text, re.MULTILINE)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_that_are_named_exist(document):
    named = commands(document.read_text()) - {"bench"}  # bench-NAME stands for all of them
    benches = {name for name in named if name.startswith("bench-")}
    assert named - benches - make_targets() == set()
    assert "bench-%" in make_targets()
    missing = {name for name in benches if not (ROOT / f"benchmarks/{name.replace('-', '_')}.py").exists()}
    assert missing == set()


def test_readme_says_the_two_commands():
    assert {"up", "test"} <= commands((ROOT / "README.md").read_text())


def links(document: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    return [target.split("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document):
    paths = [(document.parent / link).resolve() for link in links(document)]
    plain = [path for path in paths if SCREENSHOTS not in path.as_posix()]
    assert [path for path in plain if not path.exists()] == []


def test_screenshots_that_are_shown_are_committed():
    done = subprocess.run(["git", "ls-files", SCREENSHOTS], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    committed = set(done.stdout.split())
    if not committed:
        pytest.skip("no screenshots yet: make screenshots")
    shown = {(document.parent / link).resolve() for document in DOCUMENTS for link in links(document)}
    pictures = {path.relative_to(ROOT).as_posix() for path in shown if SCREENSHOTS in path.as_posix()}
    assert pictures
    assert pictures - committed == set()


def test_what_a_spec_may_say_is_listed():
    text = OPERATIONS.read_text()
    first = text.index("An instance of provisioner `process` takes from its `spec`")
    listed = text[first : text.index("The control API refuses", first)]
    assert set(re.findall(r"`([a-z_]{2,})`", listed)) - {"spec", "process", "true"} == set(SAYABLE)


def knobs_of(policy: type) -> set[str]:
    """Fields of what it is configured by."""
    config = getattr(policy, "Config", None)
    if config is None:
        told = get_type_hints(policy.__init__).get("config")
        config = next((each for each in get_args(told) if each is not type(None)), None)
    return {field.name for field in fields(config)} if config is not None else set()


@pytest.mark.parametrize(
    ("section", "registry"),
    [
        ("Orderings", ORDERINGS), ("Admissions", ADMISSIONS), ("Routings", ROUTINGS), ("Migrations", MIGRATIONS),
        ("Pacings", PACINGS), ("Batchings", BATCHINGS), ("Preemptions", PREEMPTIONS),
    ],
)  # fmt: skip
def test_the_catalogue_names_every_knob(section, registry):
    text = CATALOGUE.read_text().partition(f"\n## {section}")[2].partition("\n## ")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    place = table[0].index("knobs")
    listed = {re.findall(r"`(\w+)`", row[0])[0]: set(re.findall(r"`(\w+)`", row[place])) for row in table[2:]}
    assert {name: knobs_of(registry[name]) for name in registry} == listed
