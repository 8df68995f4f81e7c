"""What compose's services run exists: role, program, module, attribute, management command and every option."""

import ast
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from django.core.management import get_commands, load_command_class

from workers.engine.config import build_parser
from workers.supervisor.plan import console_module

ROOT = Path(__file__).resolve().parents[2]
SERVICES = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
OURS = {name: each["command"] for name, each in SERVICES.items() if each["image"].startswith("slackline")}


def programs():
    """By role, the words of what the entry point executes."""
    script = (ROOT / "docker" / "entrypoint.sh").read_text().replace("\\\n", " ")
    found = {}
    for role, body in re.findall(r"(?ms)^  (\w+)\)\n(.*?)^    ;;", script):
        [command] = re.findall(r"(?m)\bexec (.*)$", body)
        found[role] = shlex.split(command)
    return found


def module_of(words):
    """(module, attribute or None) that a program runs; None for manage.py."""
    if words[:2] == ["python", "-m"]:
        return words[2], None
    if words[:2] == ["python", "manage.py"]:
        return None
    named = words[words.index("-A") + 1] if words[0] == "celery" else words[1]
    module, _, attribute = named.partition(":")
    return module, attribute


def file_of(module):
    """The file that runs, without running it."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    return None if spec is None else Path(spec.origin)


def assigned(path):
    tree = ast.parse(path.read_text())
    targets = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_each_role_executes_something():
    assert set(programs()) == {"gateway", "console", "worker", "beat", "engine", "migrate", "manage"}
    assert {words[0] for words in programs().values()} == {"python", "uvicorn", "celery"}


@pytest.mark.parametrize("service", sorted(OURS))
def test_the_command_of_each_service_names_an_existing_module(service):
    words = programs()[OURS[service][0]]
    named = module_of(words)
    if named is None:
        assert (ROOT / words[1]).is_file()
        return
    module, attribute = named
    path = file_of(module)
    assert path is not None, f"no module {module}"
    assert path.is_relative_to(ROOT)
    assert attribute is None or attribute in assigned(path), f"{module} has no {attribute}"


def test_a_module_that_is_not_there_would_be_found():
    assert file_of("api.nowhere") is None
    assert "application" not in assigned(file_of("workers.celery"))


@pytest.mark.parametrize("service", sorted(name for name, command in OURS.items() if command[0] == "manage"))
def test_management_commands_take_their_options(service):
    _, name, *arguments = OURS[service]
    parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
    told = parser.parse_args([str(word) for word in arguments])  # raises CommandError for what it does not know
    assert told.verbosity == 1


@pytest.mark.parametrize("service", sorted(name for name, command in OURS.items() if command[0] == "engine"))
def test_engines_take_their_options(service):
    fixed = programs()["engine"][3:]
    words = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", word) for word in (*fixed, *OURS[service][1:]) if word != "$@"]
    known = build_parser().parse_args(words)
    assert (known.host, known.port) == ("0.0.0.0", 8100)
    # The fleet's calls are proved for the registered name; a container's own name is a random number.
    assert known.advertise_host == service


def test_the_console_of_the_image_has_the_limits_of_that_of_make_up():
    """Without these words uvicorn would serve without our limits, and believe headers that any client can send."""
    image, ours = programs()["console"], list(console_module(8000))
    for option in ("--http", "--ws", "--ws-max-size", "--ws-per-message-deflate"):
        assert image[image.index(option) + 1] == ours[ours.index(option) + 1], option
    assert "--no-proxy-headers" in image
    assert "--no-proxy-headers" in ours


def test_health_checks_are_programs():
    checks = {name: each["healthcheck"]["test"] for name, each in SERVICES.items() if "healthcheck" in each}
    assert {"gateway", "console", "engine-1", "engine-2", "postgres", "redis"} <= set(checks)
    for name, (how, *words) in checks.items():
        assert how in ("CMD", "CMD-SHELL"), name
        if words[0] == "python":
            compile(words[2], name, "exec")
        if how == "CMD-SHELL":
            done = subprocess.run(["sh", "-n", "-c", words[0]], capture_output=True, check=False)
            assert done.returncode == 0, name


def test_the_build_of_the_image_is_where_it_says():
    builds = [each["build"] for each in SERVICES.values() if "build" in each]
    assert builds
    for build in builds:
        context = (ROOT / "docker" / build["context"]).resolve()
        assert context == ROOT
        assert (context / build["dockerfile"]).is_file()


def test_a_gateway_recreated_finds_its_spool():
    """Without a name it takes its host's, which is another in each container."""
    assert OURS["gateway"][1:] == ["--name", "gateway-1"]
    assert any(volume.endswith(":/var/lib/slackline/data") for volume in SERVICES["gateway"]["volumes"])


def test_pages_name_an_address_that_people_reach():
    told = SERVICES["console"]["environment"]
    assert told["GATEWAY_PUBLIC_URL"] == "http://localhost:8080"
    assert "127.0.0.1:8080:8080" in SERVICES["gateway"]["ports"]
