"""compose.yaml gives each service the secrets, networks and rights that docs/reference/trust-boundaries.md says."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

DOCKER = Path(__file__).resolve().parents[2] / "docker"
DOCUMENT = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = DOCUMENT["services"]
OURS = sorted(name for name, each in SERVICES.items() if each["image"].startswith("slackline"))

# By service: the variables of docker/.env that it gets, and its networks.
SECRETS = {
    "postgres": {"POSTGRES_PASSWORD", "OWNER_DB_PASSWORD", "GATEWAY_DB_PASSWORD", "CONSOLE_DB_PASSWORD"}
    | {"WORKER_DB_PASSWORD"},
    "redis": {f"REDIS_{name}_PASSWORD" for name in ("GATEWAY", "CONSOLE", "WORKER", "BEAT")},
    "migrate": {"OWNER_DB_PASSWORD", "REDIS_CONSOLE_PASSWORD"},
    "seed": {"OWNER_DB_PASSWORD", "REDIS_CONSOLE_PASSWORD"},
    "register": {"OWNER_DB_PASSWORD", "REDIS_CONSOLE_PASSWORD"},
    "gateway": {"GATEWAY_DB_PASSWORD", "REDIS_GATEWAY_PASSWORD", "FLEET_TOKEN", "METRICS_TOKEN"},
    "console": {"CONSOLE_DB_PASSWORD", "REDIS_CONSOLE_PASSWORD", "SECRET_KEY", "METRICS_TOKEN"},
    "worker": {"WORKER_DB_PASSWORD", "REDIS_WORKER_PASSWORD", "FLEET_TOKEN"},
    "analysis": {"WORKER_DB_PASSWORD", "REDIS_WORKER_PASSWORD"},
    "pruning": {"WORKER_DB_PASSWORD", "REDIS_WORKER_PASSWORD"},
    "beat": {"REDIS_BEAT_PASSWORD"},
    "engine-1": {"FLEET_TOKEN"},
    "engine-2": {"FLEET_TOKEN"},
}
NETWORKS = {
    "postgres": {"store"},
    "redis": {"store"},
    "migrate": {"store"},
    "seed": {"store"},
    "register": {"store"},
    "gateway": {"front", "store", "engines"},
    "console": {"front", "store"},
    "worker": {"store", "engines"},
    "analysis": {"store"},
    "pruning": {"store"},
    "beat": {"store"},
    "engine-1": {"engines"},
    "engine-2": {"engines"},
}


def secrets(service):
    return set(re.findall(r"\$\{([A-Z_]+)", str(service.get("environment", {}))))


def test_each_service_has_the_secrets_of_its_row():
    assert {name: secrets(each) for name, each in SERVICES.items()} == SECRETS


def test_each_service_is_on_the_networks_of_its_row():
    assert {name: set(each["networks"]) for name, each in SERVICES.items()} == NETWORKS
    closed = {name for name, each in DOCUMENT["networks"].items() if each and each.get("internal")}
    assert closed == {"store", "engines"}


def test_instances_may_be_on_the_network_of_engines_alone():
    """Gateway and worker are on the network of the stores too, which no instance's URL may lead to."""
    (pool,) = DOCUMENT["networks"]["engines"]["ipam"]["config"]
    for name in ("gateway", "worker", "console", "register"):
        assert SERVICES[name]["environment"]["ENGINE_NETWORKS"] == pool["subnet"], name


def test_an_engine_reaches_neither_the_store_nor_the_console():
    assert not NETWORKS["engine-1"] & (NETWORKS["postgres"] | NETWORKS["console"])


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_is_root_or_writes_its_image(name):
    service = SERVICES[name]
    user, group = service["user"].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_limits(name):
    assert {"mem_limit", "cpus", "pids_limit"} <= SERVICES[name].keys()


@pytest.mark.parametrize("name", OURS)
def test_what_it_writes_is_a_volume_or_in_memory(name):
    service = SERVICES[name]
    places = [each.split(":")[1 if each in service.get("volumes", []) else 0] for each in service["tmpfs"]]
    places += [volume.split(":")[1] for volume in service.get("volumes", [])]
    assert sorted(places) == ["/tmp", "/var/lib/slackline/data"]


def test_no_volume_is_shared():
    named = [volume.split(":")[0] for each in SERVICES.values() for volume in each.get("volumes", ())]
    volumes = [name for name in named if not name.startswith(".")]
    assert sorted(volumes) == sorted(DOCUMENT["volumes"])


def test_only_gateway_and_console_have_ports_and_only_on_this_host():
    ports = {name: each["ports"] for name, each in SERVICES.items() if "ports" in each}
    assert set(ports) == {"gateway", "console"}
    assert all(port.startswith("127.0.0.1:") for each in ports.values() for port in each)


@pytest.mark.parametrize("variable", ["DATABASE_URL", "REDIS_URL"])
def test_no_two_processes_share_a_user(variable):
    users = {}
    for name, each in SERVICES.items():
        url = each.get("environment", {}).get(variable)
        if url:
            users.setdefault(urlsplit(re.sub(r"\$\{[^}]*\}", "x", url)).username, set()).add(name)
    assert "postgres" not in users
    once = {"migrate", "seed", "register"}  # they run as the owner, and end
    assert [names - once for names in users.values() if len(names - once) > 1] == [{"worker", "analysis", "pruning"}]


def test_scripts_that_are_mounted_are_there():
    mounted = [v.split(":")[0] for each in SERVICES.values() for v in each.get("volumes", ()) if v.startswith("./")]
    assert sorted(mounted) == ["./postgres/roles.sh", "./redis/start.sh"]
    assert all((DOCKER / path).stat().st_mode & 0o111 for path in mounted)
