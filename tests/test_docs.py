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
from api.openai.ledger import Instruments
from console.metrics import REGISTRY
from controller.core.policy import ADMISSIONS, ORDERINGS, ROUTINGS
from controller.dispatch import MIGRATIONS, POLICY_SETS
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.dispatcher import DispatchConfig
from controller.dispatch.pacing import PACINGS
from controller.engine.process_spec import SAYABLE
from controller.policies.batching import BATCHINGS
from controller.policies.preemption import PREEMPTIONS
from controller.simulator.network import LinkSettings
from controller.simulator.settings import ElasticSettings, InstanceSettings, SimulationSettings
from workers.engine.config import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SETTINGS = DOCS / "reference/settings.md"
METRICS = DOCS / "reference/metrics.md"
EXAMPLES = DOCS / "reference/worked-examples.md"
CATALOGUE = ROOT / "controller/policies/README.md"
SIMULATOR = ROOT / "controller/simulator/README.md"
READMES = ("README.md", "CONTRIBUTING.md", "controller/simulator/README.md", "benchmarks/data/README.md")
DOCUMENTS = (*(ROOT / name for name in READMES), CATALOGUE, *sorted(DOCS.rglob("*.md")))
CODE = ("api", "benchmarks", "console", "controller", "tests", "workers")
SCREENSHOTS = "docs/screenshots/"
READERS = {"text", "choice", "flag", "number", "whole", "names", "mapping", "url", "database", "secret"}
OF_DJANGO = {"migrate", "check", "createsuperuser", "shell"}
NOT_METRICS = {"slackline_session_8000", "slackline_plugin", "slackline_no_analyser"}  # a cookie, contenders
NOT_OURS = {"PYTHON", "VENV"}  # variables of make itself
EXAMPLE_FILES = {"least_waiting.py"}  # CONTRIBUTING adds it
GATEWAY_GAUGES = ("api/openai/status.py", "api/openai/service.py")
CONSOLE_GAUGES = "console/views/site/metrics.py"


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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
    parts = ("supervisor/settings", "supervisor/launching", "flowd/settings")
    text = "".join((ROOT / f"workers/{part}.py").read_text() for part in parts)
    return set(re.findall(r'(?:environ\.get\(|environ, |environ\[)"([A-Z_]+)"', text))


def image_settings() -> set[str]:
    optional = "".join((ROOT / f"docker/{name}").read_text() for name in ("entrypoint.sh", "compose.yaml"))
    return {
        *re.findall(r"\$\{([A-Z_]+):-", optional),
        *re.findall(r"(?m)^([A-Z_]+)=", (ROOT / "docker/env.example").read_text()),
    }


def test_readers_are_all_known():
    tree = ast.parse((ROOT / "console/environment.py").read_text())
    [reader] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    public = {f.name for f in reader.body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")}
    assert public == READERS


@pytest.mark.parametrize("found", [django_settings, supervisor_settings, image_settings])
def test_every_setting_is_in_the_settings(found):
    settings = found()
    assert len(settings) >= 2
    assert settings - first_cells(SETTINGS, "[A-Z_]+") == set()


def test_the_settings_name_no_setting_that_does_not_exist():
    real = django_settings() | supervisor_settings() | image_settings() | NOT_OURS
    assert first_cells(SETTINGS, "[A-Z][A-Z_]+") - real == set()


def test_every_engine_option_is_in_the_settings():
    options = {option for action in build_parser()._actions for option in action.option_strings}
    wanted = {option for option in options if option.startswith("--")} - {"--help", "--no-enable-prefix-caching"}
    assert wanted - first_cells(SETTINGS, "--[a-z-]+") == set()


@pytest.mark.parametrize("program", ["api/openai/__main__.py", "workers/demo_load.py"])
def test_every_option_of_other_processes_is_in_the_settings(program):
    options = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (ROOT / program).read_text()))
    assert len(options) >= 3
    assert options - first_cells(SETTINGS, "--[a-z-]+") == set()


@pytest.mark.parametrize("settings", [DispatchConfig, MigratorConfig])
def test_every_dispatch_setting_is_in_the_settings(settings):
    assert set(settings.__dataclass_fields__) - first_cells(SETTINGS, "[a-z0-9_]+") == set()


def gauges(path: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / path).read_text()))


def exposed(metrics: Iterator) -> set[str]:
    return {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in metrics}


def test_every_metric_is_in_the_metrics_page():
    names = exposed(Instruments().registry.collect()) | exposed(REGISTRY.collect())
    for path in GATEWAY_GAUGES:
        found = gauges(path, r'(?m)^\s*(?:yield )?\(?"([a-z_]+)",')
        assert len(found) >= 2, f"{path}: no gauges found; has their form changed?"
        names |= {f"slackline_{name}" for name in found}
    names |= gauges(CONSOLE_GAUGES, r'GaugeMetricFamily\(\s*"([a-z_]+)"')
    assert len(names) > 30
    assert names - first_cells(METRICS, "[a-z0-9_]+") == set()


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_make_targets_that_are_named_exist(document):
    named = commands(document.read_text()) - {"bench"}  # bench-NAME stands for all of them
    benches = {name for name in named if name.startswith("bench-")}
    assert named - benches - make_targets() == set()
    assert "bench-%" in make_targets()
    missing = {name for name in benches if not (ROOT / f"benchmarks/{name.replace('-', '_')}.py").exists()}
    assert missing == set()


def test_readme_says_the_two_commands():
    assert {"up", "test"} <= commands((ROOT / "README.md").read_text())


def links(document: Path) -> list[tuple[Path, str]]:
    """File and fragment of each relative link."""
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    found = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    return [((document.parent / path).resolve() if path else document, anchor) for path, _, anchor in found]


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings, and those that are written out."""
    text = re.sub(r"(?ms)^```.*?^```", "", document.read_text())
    titles = [re.sub(r"[`*]", "", title).strip().lower() for title in re.findall(r"(?m)^#+ (.+)$", text)]
    slugs = {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_relative_links_lead_somewhere(document):
    assert [path for path, _ in links(document) if not path.exists()] == []
    fragments = [(path, anchor) for path, anchor in links(document) if anchor and path.suffix == ".md"]
    assert [f"{path.name}#{anchor}" for path, anchor in fragments if anchor not in anchors(path)] == []


PATH = re.compile(r"`((?:api|benchmarks|console|controller|docker|docs|static|templates|tests|workers)/[\w./-]+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_paths_that_are_named_exist(document):
    """Files and folders in backquotes; NAME and MACHINE stand for many."""
    named = [name for name in PATH.findall(document.read_text()) if not re.search("NAME|MACHINE|results", name)]
    assert {name for name in named if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_files_that_are_named_without_a_folder_exist(document):
    """Such as `driver.py`, or `fleet/monitor.py` in the README of a package: anywhere in the tree."""
    named = re.findall(r"`((?:[\w-]+/)*\w+\.py)`", document.read_text())
    real = {f"/{relative(path)}" for path in (*source_files(), *ROOT.glob("*.py"))}
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in real)}
    assert {name for name in missing if "NAME" not in name} - EXAMPLE_FILES == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_modules_that_are_run_exist(document):
    ours = re.findall(r"python -m ((?:api|benchmarks|console|controller|tests|workers)[\w.]*)", document.read_text())
    places = {name: ROOT / name.rstrip(".").replace(".", "/") for name in ours}
    assert {name for name, at in places.items() if not (at.with_suffix(".py").exists() or at.is_dir())} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_commands_of_manage_py_that_are_named_exist(document):
    named = set(re.findall(r"manage\.py ([a-z_]+)", document.read_text())) - OF_DJANGO
    assert {name for name in named if not (ROOT / f"console/management/commands/{name}.py").exists()} == set()


def test_metrics_that_are_named_are_in_the_metrics_page():
    listed = first_cells(METRICS, "[a-z0-9_]+")
    named = {
        name for document in DOCUMENTS for name in re.findall(r"`(slackline_[a-z0-9_]*[a-z0-9])`", document.read_text())
    }
    assert named - listed - NOT_METRICS == set()


CODE_PATH = re.compile(
    r"(?<![\w./-])((?:api|benchmarks|console|controller|docs|tests|workers)/[\w./-]+\.(?:py|md|json))\b"
)


def test_paths_that_code_names_exist():
    """In docstrings, comments and help texts. NAME, PAPER and ID stand for many."""
    folders = ("api", "benchmarks", "console", "controller", "workers")
    named = {(relative(path), name) for path in source_files(*folders) for name in CODE_PATH.findall(path.read_text())}
    real = {(at, name) for at, name in named if not re.search("NAME|PAPER|MACHINE|ID", name)}
    assert sorted((at, name) for at, name in real if not (ROOT / name).exists()) == []


def test_pictures_that_are_tracked_are_those_that_are_shown():
    done = subprocess.run(["git", "ls-files", SCREENSHOTS], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    shown = {relative(path) for document in DOCUMENTS for path, _ in links(document)}
    assert set(done.stdout.split()) == {path for path in shown if path.startswith(SCREENSHOTS)}


def source_files(*folders: str) -> list[Path]:
    return [path for folder in folders or CODE for path in (ROOT / folder).rglob("*.py")]


def test_every_worked_example_that_is_cited_exists():
    """A letter of a paper and a number, in what implements or tests the papers. F1 to F3 stands for three."""
    places = source_files("controller", "benchmarks/reproduce", "tests/controller", "tests/benchmarks")
    texts = [path.read_text() for path in places]
    cited = {name for text in texts for name in re.findall(r"\b[HFKCM]\d{1,2}\b", text)}
    ranges = [found for text in texts for found in re.findall(r"\b([HFKCM])(\d+)(?: to |-)\1(\d+)\b", text)]
    cited |= {f"{letter}{i}" for letter, first, last in ranges for i in range(int(first), int(last) + 1)}
    assert len(cited) > 20
    assert cited - set(re.findall(r"(?m)^### ([HFKCM]\d+)\. ", EXAMPLES.read_text())) == set()


def test_every_decision_has_one_place_and_is_in_the_index():
    texts = {path.name: path.read_text() for path in sorted((DOCS / "decisions").glob("*.md"))}
    index = texts.pop("README.md")
    placed = [(name, n) for name, text in texts.items() for n in re.findall(r'<a id="(\d+)"></a>\n\*\*\1\. ', text)]
    numbers = sorted(int(n) for _, n in placed)
    assert numbers == sorted(set(numbers))
    assert {f"{name}#{n}" for name, n in placed} == set(re.findall(r"\[\d+\]\(([\w-]+\.md#\d+)\)", index))
    cited = {int(n) for path in source_files() for n in re.findall(r"\b[Dd]ecision (\d{1,3})\b", path.read_text())}
    assert cited
    assert cited <= set(numbers)


def test_code_reads_no_data_outside_the_tree():
    """A clone alone runs everything."""
    outside = re.compile(r"""shared["']? ?/ ?["']?data""")
    assert [relative(path) for path in source_files() if outside.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("settings", "elsewhere"),
    [
        # `latency` is `profile` in a file; `left` is of replays, which no file names
        (InstanceSettings, {"latency", "left"}),
        (SimulationSettings, {"instances"}),
        (LinkSettings, set()),
        (ElasticSettings, {"scaling"}),
    ],
)
def test_every_field_of_an_experiment_is_in_the_page_of_the_simulator(settings, elsewhere):
    listed = first_cells(SIMULATOR, "[a-z0-9_]+")
    assert {field.name for field in fields(settings)} - elsewhere - listed == set()


def test_what_a_spec_may_say_is_listed():
    text = SETTINGS.read_text()
    first = text.index("An instance of provisioner `process` takes these options from its `spec`")
    listed = text[first : text.index("The control API refuses", first)]
    assert set(re.findall(r"`([a-z_]{2,})`", listed)) - {"spec", "process", "true"} == set(SAYABLE)


def settings_of(policy: type) -> set[str]:
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
def test_the_catalogue_names_every_setting(section, registry):
    text = CATALOGUE.read_text().partition(f"\n## {section}")[2].partition("\n## ")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    place = table[0].index("settings")
    listed = {re.findall(r"`(\w+)`", row[0])[0]: set(re.findall(r"`(\w+)`", row[place])) for row in table[2:]}
    assert {name: settings_of(registry[name]) for name in registry} == listed
