"""Imports go one way: console | api -> workers -> controller (Django half) -> controller (pure half)."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
INIT = "__init__.py"
Function = ast.FunctionDef | ast.AsyncFunctionDef
PURE = ("core", "slo", "predict", "policies", "engine", "scale", "dispatch", "flow", "simulator", "wording")
DJANGO_HALF = ("models", "services", "selectors", "admin", "migrations", "apps")
BANNED_IN_PURE = {
    "django", "celery", "channels", "rest_framework", "torch", "socket", "requests", "aiohttp", "httpx", "redis",
    "psycopg", "asyncio", "time", "random", "threading", "subprocess", "os", "pathlib", "logging",
}  # fmt: skip
LAYERS = {  # what each pure package may import of ours
    "core": set(),
    "slo": {"core"},
    "predict": {"core"},
    "policies": {"core"},
    "engine": {"core", "policies"},
    "scale": {"core"},
    "dispatch": {"core", "predict", "policies"},
    "flow": {"core"},
    "wording": {"core"},
    "simulator": {"core", "slo", "predict", "policies", "engine", "scale", "dispatch", "flow"},
}


class Parsed(NamedTuple):
    """What these tests ask about a file. Trees of all files would take hundreds of MB."""

    documented: bool
    imports: list[ast.Import | ast.ImportFrom]
    imports_at_top: list[ast.Import | ast.ImportFrom]
    functions: list[tuple[str, int]]  # name and lines
    classes: list[str]  # at the top


@cache  # most files are asked about by several tests
def parsed(path):
    tree = ast.parse(path.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | Function)]
    return Parsed(
        documented=bool(ast.get_docstring(tree)),
        imports=[node for node in nodes if not isinstance(node, Function)],
        imports_at_top=[node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)],
        functions=[(node.name, node.end_lineno - node.lineno) for node in nodes if isinstance(node, Function)],
        classes=[node.name for node in tree.body if isinstance(node, ast.ClassDef)],
    )


def imports(path):
    """What every import in a file names, at module level or not."""
    return [name for node in parsed(path).imports for name in imports_of(node)]


def imports_of(node):
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(*folders):
    """A folder that is not there would pass every test."""
    found = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in folders}
    assert all(found.values()), [folder for folder, paths in found.items() if not paths]
    return [path for paths in found.values() for path in paths]


def offences(paths, wrong):
    return [f"{path.relative_to(ROOT)} imports {name}" for path in paths for name in imports(path) if wrong(path, name)]


def starts(name, *prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def test_every_package_is_on_one_side():
    packages = {path.parent.name for path in (ROOT / "controller").glob("*/__init__.py")}
    assert packages == {*PURE, *DJANGO_HALF[:-1], "postgres"}


def test_controller_package_is_empty():
    assert (ROOT / "controller/__init__.py").read_text() == ""


def test_every_package_says_what_may_be_in_it():
    """`controller` alone stays empty: engines import policies through it without Django."""
    packages = [path for path in files("controller", "workers", "api", "console", "benchmarks") if path.name == INIT]
    silent = [path for path in packages if not parsed(path).documented]
    assert {str(path.relative_to(ROOT)) for path in silent} <= {f"controller/{INIT}", f"controller/migrations/{INIT}"}


OURS = ("controller", "workers", "api", "console", "benchmarks")


@cache
def module_graph():
    """Which of our modules each of our modules imports, at its top or in a function: a lazy import hides no cycle."""
    modules = {module_name(path): path for path in files(*OURS)}
    graph = {}
    for module, path in modules.items():
        wanted = {name for node in parsed(path).imports for name in modules_of(node, modules)}
        graph[module] = wanted - {module}
    return graph


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_of(node, modules):
    """`from package import name` means the module of that name where there is one, else the package itself."""
    names = list(imports_of(node))
    if isinstance(node, ast.ImportFrom):
        names = [name if name in modules else node.module for name in names[1:]]
    return [name for name in names if name in modules]


def package_graph(depth):
    """The same between packages of at most `depth` names; a package and one inside it are not two sides."""
    packages = {module_name(path) for path in files(*OURS) if path.name == "__init__.py"}
    graph = {}
    for module, imported in module_graph().items():
        here = package_of(module, packages, depth)
        others = {package_of(name, packages, depth) for name in imported}
        apart = {other for other in others if not starts(other, here) and not starts(here, other)}
        graph.setdefault(here, set()).update(apart)
    return graph


def package_of(module, packages, depth):
    parts = module.split(".") if module in packages else module.split(".")[:-1]
    return ".".join(parts[:depth])


def cycles(graph):
    """Tarjan's strongly connected components of more than one node, sorted."""
    order, lowest, stack, found = {}, {}, [], []

    def visit(node):
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == order[node]:
            at = stack.index(node)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in order:
            visit(node)
    return sorted(each for each in found if len(each) > 1)


def test_a_cycle_would_be_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}) == [["a", "b", "c"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_modules_import_each_other_in_no_cycle():
    assert cycles(module_graph()) == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_packages_import_each_other_in_no_cycle(depth):
    assert cycles(package_graph(depth)) == []


def inside(package, graph):
    """The same between the modules of a package, each of its inner packages as one. A module beside an inner package
    is either below it (what it is made of) or above it (what is made of it)."""

    def part(module):
        return ".".join(module.split(".")[: package.count(".") + 2])

    found = {}
    for module in graph.keys() - {package}:
        if starts(module, package):
            others = {part(name) for name in graph[module] if starts(name, package) and name != package}
            found.setdefault(part(module), set()).update(others - {part(module)})
    return found


def test_a_cycle_of_a_package_with_its_parent_would_be_found():
    graph = {"a": set(), "a.access": {"a.forms.refused"}, "a.forms.removed": {"a.access"}, "a.forms.refused": set()}
    assert cycles(graph) == []
    assert cycles(inside("a", graph)) == [["a.access", "a.forms"]]


def test_packages_and_the_modules_beside_them_import_each_other_in_no_cycle():
    packages = [module_name(path) for path in files(*OURS) if path.name == INIT]
    assert {package: found for package in packages if (found := cycles(inside(package, module_graph())))} == {}


@pytest.mark.parametrize("package", PURE)
def test_the_pure_half_does_no_io(package):
    paths = [p for p in files(f"controller/{package}") if p.name != "__main__.py"]
    assert offences(paths, lambda _, name: name.split(".")[0] in BANNED_IN_PURE) == []
    above = ("console", "api", "workers", *(f"controller.{half}" for half in DJANGO_HALF))
    assert offences(paths, lambda _, name: starts(name, *above)) == []


@pytest.mark.parametrize("package", sorted(LAYERS))
def test_pure_packages_keep_their_layers(package):
    allowed = {package, *LAYERS[package]}

    def wrong(_, name):
        parts = name.split(".")
        return parts[0] == "controller" and len(parts) > 1 and parts[1] in PURE and parts[1] not in allowed

    assert offences(files(f"controller/{package}"), wrong) == []


def test_the_django_half_never_looks_up():
    paths = files(*(f"controller/{half}" for half in DJANGO_HALF[:-1]))
    assert offences(paths, lambda _, name: starts(name, "console", "api", "workers", "celery", "channels")) == []
    assert offences(paths, lambda _, name: starts(name, "rest_framework")) == []


def test_workers_never_look_up():
    assert offences(files("workers"), lambda _, name: starts(name, "console", "api")) == []


def test_api_and_console_are_siblings():
    wired = {ROOT / "console/asgi.py", ROOT / "console/urls.py"}
    console = [p for p in files("console") if p not in wired]
    assert offences(console, lambda _, name: starts(name, "api")) == []
    assert offences(files("api"), lambda _, name: starts(name, "console")) == []


def test_the_engine_runs_without_django():
    below = ("workers.backends", "controller.models", "controller.services", "controller.selectors")
    assert offences(files("workers/engine"), lambda _, name: starts(name, "django", "celery", *below)) == []


def test_torch_is_optional():
    """At the top of a module only where the module is for torch; everything else must import without it."""
    optional = ("torch", "safetensors", "tokenizers", "transformers", "jinja2")
    needed = [
        path
        for path in files("api", "console", "controller", "workers", "benchmarks")
        for node in parsed(path).imports_at_top
        for name in imports_of(node)
        if starts(name, *optional) and ROOT / "workers/engine/torch" not in path.parents
    ]
    assert {str(path.relative_to(ROOT)) for path in needed} <= {
        "benchmarks/bench_preempt.py",
        "benchmarks/vllm/model.py",
    }


def test_backends_know_no_orm_and_no_policies():
    wrong = ("django", "controller.models", "controller.services", "controller.policies", "torch")
    assert offences(files("workers/backends"), lambda _, name: starts(name, *wrong)) == []


def test_provisioners_are_named_in_their_registry_alone():
    """Everything else asks for an ability, so that a provisioner can be added without a search."""
    named = re.compile(
        r"""provisioner["']?\]?\s*(?:=|==|!=|in)\s*\(?["'](?:process|static)["']|\(\s*["'](?:process|static)["']\s*,"""
    )
    registry = ROOT / "controller/scale/provisioning.py"
    where = files("api", "console", "controller", "workers") + sorted((ROOT / "templates").rglob("*.html"))
    others = [path for path in where if path != registry and "migrations" not in path.parts]
    assert [str(path.relative_to(ROOT)) for path in others if named.search(path.read_text())] == []
    assert named.search('row.provisioner == "static"')


def test_files_stay_readable():
    """Cohesion decides how long a file is; beyond 600 lines it is more than one thing."""
    long = [p for p in files("controller", "workers", "api", "console", "benchmarks") if "migrations" not in p.parts]
    assert [str(p.relative_to(ROOT)) for p in long if p.read_text().count("\n") > 600] == []


def test_functions_stay_readable():
    paths = files("controller", "workers", "api", "console")
    long = [(path, name) for path in paths for name, lines in parsed(path).functions if lines >= 60]
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in long] == []


# Names that stand for one thing in several files: a policy's settings, a management command, a migration, a row of the
# database beside the value of the same name (`controller.core`).
SHARED_NAMES = {
    "Command", "Config", "Migration",
    "Decision", "LaunchTemplate", "RequestRecord", "Role",
}  # fmt: skip


def test_no_two_public_classes_have_the_same_name():
    found: dict[str, list[str]] = {}
    for path in files("controller", "workers", "api", "console", "benchmarks"):
        for name in parsed(path).classes:
            if not name.startswith("_"):
                found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1 and name not in SHARED_NAMES}
    assert not twice
