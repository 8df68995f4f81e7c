"""Launch arguments for a server seeded from a running one: a joiner that reads them as SGLang does reaches the seed."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import aiohttp
import pytest

from controller.core.errors import ConfigError
from controller.core.types import Role
from tests.workers.backends.sglang_seed import layout_of
from tests.workers.backends.sglang_server import SglangServer
from workers.backends.base import NotSupported
from workers.backends.sglang_launch import SEEDS, joiner_arguments
from workers.backends.sglang_state import ServerInfo, parse_info


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Only flags that SGLang 0.5.23 has; anything else ends the joiner at its start."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag in ("--model-path", "--dtype", "--quantization", "--served-model-name", "--load-format"):
        parser.add_argument(flag)
    for flag in ("--port", "--tp-size", "--disaggregation-bootstrap-port", "--engine-info-bootstrap-port"):
        parser.add_argument(flag, type=int)
    for flag in ("dp", "attn-dp", "attn-cp", "dcp", "ep", "moe-dp", "moe-dense-tp"):
        parser.add_argument(f"--{flag}-size", type=int)
    parser.add_argument("--moe-a2a-backend", choices=("none", "deepep", "mooncake"))
    parser.add_argument("--ep-num-redundant-experts", type=int)
    for flag in (
        "dp-attention",
        "pd-role-switch",
        "memory-saver",
        "weights-cpu-backup",
        "metrics",
        "priority-scheduling",
    ):
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


async def joined(arguments: list[str], seed: SglangServer) -> str:
    """As the loader of a new server goes about it: "" with its weights, or why it has none."""
    args = parsed(arguments)
    assert args.load_format == "remote_instance"
    url = f"http://{args.remote_instance_weight_loader_seed_instance_ip}"
    url += f":{args.remote_instance_weight_loader_seed_instance_service_port}"
    mine = layout_of(args.dtype, args.quantization, args.tp_size or 1)
    async with aiohttp.ClientSession() as session:
        if args.remote_instance_weight_loader_backend == "transfer_engine":
            async with session.get(f"{url}/remote_instance_transfer_engine_info?rank=0") as response:
                _, theirs = (await response.json())["remote_instance_transfer_engine_info"]
                return "" if theirs == mine else "other parameters"
        ports = args.remote_instance_weight_loader_send_weights_group_ports
        group = {
            "master_address": args.remote_instance_weight_loader_seed_instance_ip,
            "ports": ",".join(map(str, ports)),
            "group_name": "send_weights_127.0.0.1",
        }
        met = {**group, "group_rank": 0, "world_size": 2, "backend": "nccl"}
        async with session.post(f"{url}/init_weights_send_group_for_remote_instance", json=met) as response:
            if response.status != 200:
                return str((await response.json())["message"])
        seed.receives(group["group_name"], mine)
        async with session.post(f"{url}/send_weights_to_remote_instance", json=group) as response:
            return str((await response.json())["message"])


async def by_nccl(seed: SglangServer, ports: list[int]) -> list[str]:
    return joiner_arguments(seed.url, await seed_info(seed), way="nccl", role=Role.COLLOCATED, port=30001, ports=ports)


async def generated(seed: SglangServer) -> int:
    """An answer of the seed: its status."""
    body = {"prompt": "x", "max_tokens": 2}
    async with aiohttp.ClientSession() as session, session.post(f"{seed.url}/v1/completions", json=body) as response:
        return response.status


async def test_a_joiner_reads_the_seeds_memory_by_transfer_engine() -> None:
    options = {SEEDS: True, "enable_pd_role_switch": True, "disaggregation_mode": "prefill", "tp_size": 2}
    async with SglangServer(**options) as seed:
        made = joiner_arguments(seed.url, await seed_info(seed), way="transfer_engine", role=Role.DECODE, port=30001)
        args = parsed(made)
        assert (args.port, args.model_path, args.tp_size) == (30001, "/models/demo", 2)
        assert (args.disaggregation_mode, args.enable_pd_role_switch) == ("decode", True)
        assert await joined(made, seed) == ""
        assert seed.hold.is_set(), "it is only read"


async def test_a_joiner_of_nccl_brings_a_port_for_each_rank() -> None:
    async with SglangServer(tp_size=2, enable_priority_scheduling=True) as seed:
        info = await seed_info(seed)
        made = joiner_arguments(seed.url, info, way="nccl", role=Role.COLLOCATED, port=30001, ports=[29600, 29601])
        assert parsed(made).enable_priority_scheduling
        assert parsed(made).disaggregation_mode is None
        assert await joined(made, seed) == ""
        with pytest.raises(ConfigError) as caught:
            joiner_arguments(seed.url, info, way="nccl", role=Role.COLLOCATED, port=30001, ports=[29600])
        assert caught.value.field == "ports"


async def test_a_seed_by_nccl_generates_nothing_while_it_sends_and_takes_one_joiner_at_a_time() -> None:
    async with SglangServer() as seed:
        seed.broadcast.clear()
        first = asyncio.create_task(joined(await by_nccl(seed, [29600]), seed))
        await seed.sending.wait()
        answer = asyncio.create_task(generated(seed))
        assert "another instance" in await joined(await by_nccl(seed, [29601]), seed)
        await asyncio.sleep(0.05)
        assert not answer.done()
        seed.broadcast.set()
        assert (await first, await answer) == ("", 200)


async def test_ports_of_a_join_are_used_up() -> None:
    async with SglangServer() as seed:
        assert await joined(await by_nccl(seed, [29600]), seed) == ""
        assert "already in use" in await joined(await by_nccl(seed, [29600]), seed)
        assert await joined(await by_nccl(seed, [29601]), seed) == ""
        assert await generated(seed) == 200


@pytest.mark.parametrize("started", [{"dtype": "float32"}, {"quantization": "fp8"}])
async def test_the_command_copies_the_number_format_without_which_the_seed_would_stall(started: dict) -> None:
    async with SglangServer(**started) as seed:
        made = await by_nccl(seed, [29600])
        assert await joined(made, seed) == ""
        other = await by_nccl(seed, [29601])
        at = other.index(f"--{next(iter(started))}")
        del other[at : at + 2]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(joined(other, seed), 0.2)
        assert not seed.hold.is_set(), "the joiner has gone, and it waits still"


async def test_by_transfer_engine_other_parameters_are_seen_and_the_seed_serves_on() -> None:
    async with SglangServer(**{SEEDS: True, "dtype": "float32"}) as seed:
        made = joiner_arguments(
            seed.url, await seed_info(seed), way="transfer_engine", role=Role.COLLOCATED, port=30001
        )
        assert await joined(made, seed) == ""
        at = made.index("--dtype")
        assert await joined(made[:at] + made[at + 2 :], seed) == "other parameters"
        assert await generated(seed) == 200


def made(arguments: dict, **more: Any) -> argparse.Namespace:
    """For a seed at port 30000, with the arguments that its `/server_info` names."""
    given = {"way": "transfer_engine", "role": Role.COLLOCATED, "port": 30001, **more}
    seed = ServerInfo(given["role"], {SEEDS: True, "port": 30000, "tp_size": 8, **arguments})
    return parsed(joiner_arguments("http://seed:30000", seed, **given))


def test_the_joiner_has_the_layout_of_experts_and_of_attention_that_the_seed_has() -> None:
    layout = {
        "ep_size": 8,
        "attn_dp_size": 4,
        "moe_dense_tp_size": 1,
        "moe_a2a_backend": "deepep",
        "ep_num_redundant_experts": 16,
    }
    args = made({"dp_size": 2, "moe_dp_size": 1, **layout})
    assert {name: getattr(args, name) for name in layout} == layout
    assert (args.tp_size, args.dp_size, args.moe_dp_size) == (8, 2, None)


def test_a_seed_that_still_says_it_of_its_data_parallel_ranks_is_copied_so() -> None:
    assert made({"dp_size": 4, "enable_dp_attention": True}).enable_dp_attention
    assert not made({"attn_dp_size": 4, "enable_dp_attention": True}).enable_dp_attention


def test_defaults_of_the_layout_are_left_to_the_joiner() -> None:
    said = {"dp_size": 1, "ep_size": 1, "moe_a2a_backend": "none", "moe_dense_tp_size": None, "attn_dp_size": 1}
    args = made(said)
    assert {getattr(args, name) for name in said} == {None}


@pytest.mark.parametrize(
    ("arguments", "role", "bootstrap"),
    [
        ({}, Role.PREFILL, 31001),
        ({"disaggregation_bootstrap_port": 31001}, Role.PREFILL, 32001),
        ({}, Role.DECODE, None),
        ({"enable_pd_role_switch": True}, Role.DECODE, 31001),
        ({"enable_pd_role_switch": True}, Role.COLLOCATED, None),
    ],
)
def test_one_that_prefills_or_may_be_switched_to_has_a_bootstrap_port_of_its_own(
    arguments: dict, role: Role, bootstrap: int | None
) -> None:
    assert made(arguments, role=role).disaggregation_bootstrap_port == bootstrap


def test_where_weights_are_published_is_a_port_of_its_own() -> None:
    assert made({}).engine_info_bootstrap_port == 31001
    assert made({"engine_info_bootstrap_port": 31001}).engine_info_bootstrap_port == 32001
    assert made({"tp_size": 1}, way="nccl", ports=[29600]).engine_info_bootstrap_port is None


@pytest.mark.parametrize("first", [30001, 1024, 65500])
def test_joiners_of_one_host_share_no_port_with_each_other_or_the_seed(first: int) -> None:
    used = [30000, 8998, 6789]
    for port in range(first, first + 8):
        args = made({}, role=Role.PREFILL, port=port)
        used += [args.port, args.disaggregation_bootstrap_port, args.engine_info_bootstrap_port]
    assert len(set(used)) == len(used) == 27
    assert all(0 < each <= 65535 for each in used)


@pytest.mark.parametrize(
    ("arguments", "more", "field"),
    [
        ({}, {}, SEEDS),
        ({"pp_size": 2, SEEDS: True}, {}, "pp_size"),
        ({"attn_dp_size": 2}, {"way": "nccl", "ports": [1]}, "attn_dp_size"),
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
