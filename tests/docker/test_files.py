"""The image and compose files read as what they should be; nothing is built or pulled."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from workers.celery import app

DOCKER = Path(__file__).resolve().parents[2] / "docker"


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


def roles():
    script = (DOCKER / "entrypoint.sh").read_text()
    return set(re.findall(r"^  (\w+)\)$", script, re.MULTILINE))


def test_entry_point_is_valid_shell_and_executable():
    script = DOCKER / "entrypoint.sh"
    done = subprocess.run(["sh", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert script.stat().st_mode & 0o111


def test_compose_has_every_process(services):
    wanted = {"postgres", "redis", "gateway", "console", "worker", "beat", "engine-1", "engine-2", "migrate"}
    assert wanted <= set(services)


def test_commands_name_roles_of_the_entry_point(services):
    named = {service["command"][0] for service in services.values() if service["image"].startswith("slackline")}
    assert named <= roles()
    assert {"gateway", "console", "worker", "beat", "engine", "migrate"} <= named


def test_every_queue_has_exactly_one_worker(services):
    workers = [service for service in services.values() if service.get("command") == ["worker"]]
    served = [queue for worker in workers for queue in worker["environment"]["WORKER_QUEUES"].split(",")]
    routed = {route["queue"] for route in app.conf.task_routes.values()} | {app.conf.task_default_queue}
    assert sorted(served) == sorted(routed)
    image = re.search(r"WORKER_QUEUES:-([a-z,]+)", (DOCKER / "entrypoint.sh").read_text())
    assert set(image[1].split(",")) == routed


def test_what_services_name_exists(services):
    document = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= services.keys(), name
        volumes = {volume.split(":")[0] for volume in service.get("volumes", []) if not volume.startswith(".")}
        assert volumes <= document["volumes"].keys(), name


def test_every_variable_without_a_default_is_in_the_example():
    text = (DOCKER / "compose.yaml").read_text()
    example = (DOCKER / "env.example").read_text()
    wanted = set(re.findall(r"\$\{([A-Z_]+):\?", text))
    assert wanted == set(re.findall(r"(?m)^([A-Z_]+)=", example))


DEFAULT = re.compile(r"\$\{([A-Z_]+):-([^}]+)\}")


def images(services, **environ):
    """By who uses it, as compose and build resolve it with these variables set."""
    dockerfile = (DOCKER / "Dockerfile").read_text()
    named = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE))
    for service in services.values():
        for name, value in service.get("build", {}).get("args", {}).items():
            assert name in named, f"the Dockerfile has no ARG {name}"
            named[name] = DEFAULT.sub(lambda found: environ.get(found[1], found[2]), value)
    used = {name: DEFAULT.sub(lambda found: environ.get(found[1], found[2]), service["image"])
            for name, service in services.items()}  # fmt: skip
    for number, base in enumerate(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)):
        used[f"stage {number}"] = re.sub(r"\$\{(\w+)\}", lambda found: named[found[1]], base)
    return used


def test_no_image_floats(services):
    found = images(services)
    assert len(found) > 8
    for image in found.values():
        assert re.fullmatch(r"[a-z]+:\d+(\.\d+)+[a-z0-9.-]*", image), f"{image} has no tag of one release"


def test_every_image_of_others_can_be_pinned_by_its_digest(services):
    pins = {name: f"{name.partition('_')[0].lower()}:1.0@sha256:{'0' * 64}"
            for name in ("POSTGRES_IMAGE", "REDIS_IMAGE", "PYTHON_IMAGE")}  # fmt: skip
    ours = {"slackline:0.1.0"}
    assert set(images(services, **pins).values()) - ours == set(pins.values())
    assert not set(images(services).values()) & set(pins.values())
    dockerfile = (DOCKER / "Dockerfile").read_text()
    assert dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.MULTILINE)) == {
        name: value for name, value in DEFAULT.findall((DOCKER / "compose.yaml").read_text()) if name == "PYTHON_IMAGE"
    }


def test_no_secret_has_a_default(services):
    text = (DOCKER / "compose.yaml").read_text()
    names = re.findall(r"(?m)^([A-Z_]+)=", (DOCKER / "env.example").read_text())
    assert {"POSTGRES_PASSWORD", "SECRET_KEY", "FLEET_TOKEN"} < set(names)
    for name in names:
        assert re.search(rf"\$\{{{name}:\?", text)
        assert f"{name}:-" not in text


def test_unknown_role_is_refused_with_the_list():
    done = subprocess.run(["sh", str(DOCKER / "entrypoint.sh"), "gatway"], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "gateway" in done.stderr
