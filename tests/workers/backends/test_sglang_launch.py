"""Launch arguments for a server seeded from a running one: a joiner that reads them as SGLang does reaches the seed."""

from __future__ import annotations

import argparse
import json

import aiohttp
import pytest

from controller.core.errors import ConfigError
from controller.core.types import Role
from tests.workers.backends.sglang_server import SglangServer
from workers.backends.base import NotSupported
from workers.backends.sglang_launch import SEEDS, joiner_arguments
from workers.backends.sglang_state import ServerInfo, parse_info


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Only flags that SGLang 0.5.23 has; anything else ends the joiner at its start."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag in ("--model-path", "--dtype", "--quantization", "--served-model-name", "--load-format"):
        parser.add_argument(flag)
    for flag in ("--port", "--tp-size", "--pp-size"):
        parser.add_argument(flag, type=int)
    for flag in ("pd-role-switch", "memory-saver", "weights-cpu-backup", "metrics", "priority-scheduling"):
        parser.add_argument(f"--enable-{flag}", action="store_true")
    parser.add_argument("--schedule-low-priority-values-first", action="store_true")
    parser.add_argument("--disaggregation-mode", choices=("null", "prefill", "decode"))
    parser.add_argument("--disaggregation-transfer-backend")
    start = "--remote-instance-weight-loader"
    parser.add_argument(f"{start}-backend", choices=("nccl", "transfer_engine", "modelexpress"))
    parser.add_argument(f"{start}-seed-instance-ip")
    parser.add_argument(f"{start}-seed-instance-service-port", type=int)
    parser.add_argument(f"{start}-send-weights-group-ports", type=json.loads)
    return parser.parse_args(arguments)


async def seed_info(server: SglangServer) -> ServerInfo:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/server_info") as response:
        return parse_info(await response.read())


async def joined(arguments: list[str]) -> str:
    """As the loader of a new server goes about it; what it found, or why not."""
    args = parsed(arguments)
    assert args.load_format == "remote_instance"
    seed = f"http://{args.remote_instance_weight_loader_seed_instance_ip}"
    seed += f":{args.remote_instance_weight_loader_seed_instance_service_port}"
    async with aiohttp.ClientSession() as session:
        if args.remote_instance_weight_loader_backend == "transfer_engine":
            async with session.get(f"{seed}/remote_instance_transfer_engine_info?rank=0") as response:
                return str(response.status)
        ports = args.remote_instance_weight_loader_send_weights_group_ports
        body = {
            "master_address": args.remote_instance_weight_loader_seed_instance_ip,
            "ports": ",".join(map(str, ports)),
            "group_rank": 0,
            "world_size": 2,
            "group_name": "send_weights_127.0.0.1",
            "backend": "nccl",
        }
        async with session.post(f"{seed}/init_weights_send_group_for_remote_instance", json=body) as response:
            return str(response.status)


async def test_a_joiner_reads_the_seeds_memory_by_transfer_engine() -> None:
    options = {SEEDS: True, "enable_pd_role_switch": True, "disaggregation_mode": "prefill", "tp_size": 2}
    async with SglangServer(**options) as seed:
        made = joiner_arguments(seed.url, await seed_info(seed), way="transfer_engine", role=Role.DECODE, port=30001)
        args = parsed(made)
        assert (args.port, args.model_path, args.tp_size) == (30001, "/models/demo", 2)
        assert (args.disaggregation_mode, args.enable_pd_role_switch) == ("decode", True)
        assert await joined(made) == "200"


async def test_a_joiner_of_nccl_brings_a_port_for_each_rank() -> None:
    async with SglangServer(tp_size=2, enable_priority_scheduling=True) as seed:
        info = await seed_info(seed)
        made = joiner_arguments(seed.url, info, way="nccl", role=Role.COLLOCATED, port=30001, ports=[29600, 29601])
        assert parsed(made).enable_priority_scheduling
        assert parsed(made).disaggregation_mode is None
        assert await joined(made) == "200"
        with pytest.raises(ConfigError) as caught:
            joiner_arguments(seed.url, info, way="nccl", role=Role.COLLOCATED, port=30001, ports=[29600])
        assert caught.value.field == "ports"


@pytest.mark.parametrize(
    ("arguments", "more", "field"),
    [
        ({}, {}, SEEDS),
        ({"dp_size": 2}, {"way": "nccl", "ports": [1]}, "dp_size"),
        ({SEEDS: True}, {"way": "rsync"}, "way"),
        ({SEEDS: True}, {"port": 0}, "port"),
        ({SEEDS: True}, {"ports": [1]}, "ports"),
        ({SEEDS: True}, {"seed_url": "nowhere"}, "seed"),
    ],
)
def test_what_could_not_work_is_refused_by_name(arguments: dict, more: dict, field: str) -> None:
    given = {"seed_url": "http://seed:30000", "way": "transfer_engine", "role": Role.COLLOCATED, "port": 1, **more}
    with pytest.raises((ConfigError, NotSupported)) as caught:
        joiner_arguments(seed=ServerInfo(Role.COLLOCATED, arguments), **given)
    assert caught.value.field == field
