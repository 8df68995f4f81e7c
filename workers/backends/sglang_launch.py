"""How to start another SGLang server whose weights come from a running one's memory (`--load-format remote_instance`).

The joining server does it all when it starts; of the seed only its description is read here. Both must have the same
model, layout and number format. With `transfer_engine` the joiner reads the seed's device memory while the seed serves;
with `nccl` the seed stops generating for the weight load and its ports are used up, so one joiner at a time. Both know
the ranks of a seed by their tensor-parallel number alone, so pipeline stages cannot be told apart.

Two servers on one host must not share a port. The joiner's ports beside its API are multiples of 1000 away from its
`port` and differ from the seed's, so joiners whose `port` differs by less than 1000 share none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from yarl import URL

from controller.core.errors import ConfigError
from controller.core.types import Role
from workers.backends.base import NotSupported
from workers.backends.sglang_state import ServerInfo

WAYS = ("transfer_engine", "nccl")
SEEDS = "remote_instance_weight_loader_start_seed_via_transfer_engine"
SAME = ("model_path", "tp_size", "dtype", "quantization", "served_model_name")  # as the seed has them
# Which rank holds which part of the weights, where that is not SGLang's default. `/server_info` reports the resolved
# `ep_size` (some a2a backends make it `tp_size`); a server that gets this value resolves it to the same.
LAYOUT: Mapping[str, object] = {
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "ep_size": 1,
    "moe_dp_size": 1,
    "moe_dense_tp_size": None,
    "moe_a2a_backend": "none",
    "ep_num_redundant_experts": 0,
}
KEPT_ON = ("enable_pd_role_switch", "enable_memory_saver", "enable_weights_cpu_backup", "enable_metrics")
FIRST_PORT, LAST_PORT = 1024, 65_535
BOOTSTRAP, INFO = "disaggregation_bootstrap_port", "engine_info_bootstrap_port"
INFO_PORT = 6789  # SGLang's default


def joiner_arguments(
    seed_url: str, seed: ServerInfo, *, way: str, role: Role, port: int, ports: Sequence[int] = ()
) -> list[str]:
    """Arguments of `python -m sglang.launch_server` for a server at `port` in `role`, seeded from `seed_url`.

    `ports`: free ones on the seed's host, one a tensor-parallel rank, for `nccl`. Raises ConfigError naming the
    argument, NotSupported naming the seed's option that stands in the way.
    """
    if way not in WAYS:
        raise ConfigError(f"way must be one of {', '.join(WAYS)}", field="way")
    if not 0 < port <= LAST_PORT:
        raise ConfigError(f"port must lie in 1 to {LAST_PORT}", field="port")
    where = URL(seed_url)
    if where.host is None or where.port is None:
        raise ConfigError(f"the seed's url {seed_url!r} names no host and port", field="seed")
    if int(seed.arguments.get("pp_size") or 1) != 1:
        raise NotSupported("SGLang cannot give its weights because the seed has pipeline stages.", "pp_size")
    arguments = ["--port", str(port)]
    for name in SAME:
        if seed.arguments.get(name) not in (None, ""):
            arguments += [_flag(name), str(seed.arguments[name])]
    for name, default in LAYOUT.items():
        if seed.arguments.get(name, default) not in (default, None):
            arguments += [_flag(name), str(seed.arguments[name])]
    if "attn_dp_size" not in seed.arguments and seed.on("enable_dp_attention"):  # before 0.5.23 said so of `dp_size`
        arguments.append("--enable-dp-attention")
    arguments += [_flag(name) for name in KEPT_ON if seed.on(name)]
    if seed.on("enable_priority_scheduling"):
        arguments.append("--enable-priority-scheduling")
        arguments += ["--schedule-low-priority-values-first"] * seed.low_first
    arguments += _role(seed, role) + _listening(seed, where.port, way=way, role=role, port=port)
    arguments += [
        *("--load-format", "remote_instance"),
        *("--remote-instance-weight-loader-backend", way),
        *("--remote-instance-weight-loader-seed-instance-ip", where.host),
        *("--remote-instance-weight-loader-seed-instance-service-port", str(where.port)),
    ]
    return arguments + (_nccl(seed, ports) if way == "nccl" else _transfer_engine(seed, ports))


def _role(seed: ServerInfo, role: Role) -> list[str]:
    if role is Role.COLLOCATED:
        return []
    return [
        *("--disaggregation-mode", role.value),
        *("--disaggregation-transfer-backend", seed.transfer_backend),
    ]


def _listening(seed: ServerInfo, seed_port: int, *, way: str, role: Role, port: int) -> list[str]:
    """Its ports beside the API's.

    A server that prefills, or may be switched to that, starts the bootstrap server of its KV transfers; for one that
    only decodes the option has no meaning. A seed by transfer engine reports where its weights are at a port of its
    own, which its API reads. Only seeds listen there: the joiner gets one in case it becomes a seed too.
    """
    wanted = []
    if role is Role.PREFILL or (role is Role.DECODE and seed.on("enable_pd_role_switch")):
        wanted.append(BOOTSTRAP)
    if way == "transfer_engine":
        wanted.append(INFO)
    theirs = {seed_port, seed.bootstrap_port, int(seed.arguments.get(INFO) or INFO_PORT)}
    near = [port + 1000 * steps for steps in (*range(1, 32), *range(-1, -32, -1))]
    free = [each for each in near if FIRST_PORT <= each <= LAST_PORT and each not in theirs]
    return [word for name, number in zip(wanted, free, strict=False) for word in (_flag(name), str(number))]


def _nccl(seed: ServerInfo, ports: Sequence[int]) -> list[str]:
    ranks = int(seed.arguments.get("tp_size") or 1)
    for name in ("dp_size", "attn_dp_size"):
        if int(seed.arguments.get(name) or 1) != 1:
            raise NotSupported("SGLang cannot send weights by nccl because the seed has data-parallel ranks.", name)
    if len(ports) != ranks or len(set(ports)) != len(ports) or not all(0 < port <= LAST_PORT for port in ports):
        raise ConfigError(f"ports: {ranks} free and different ones on the seed's host, one a rank", field="ports")
    numbers = "[" + ",".join(map(str, ports)) + "]"
    return ["--remote-instance-weight-loader-send-weights-group-ports", numbers]


def _transfer_engine(seed: ServerInfo, ports: Sequence[int]) -> list[str]:
    if ports:
        raise ConfigError("ports belong to nccl: a transfer engine needs none", field="ports")
    if not seed.on(SEEDS):
        raise NotSupported(
            "SGLang cannot give its weights by transfer_engine because the seed was started without "
            "--remote-instance-weight-loader-start-seed-via-transfer-engine; nccl needs no option of it.",
            SEEDS,
        )
    return []


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
