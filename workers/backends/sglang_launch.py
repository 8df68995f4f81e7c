"""How to start another SGLang server whose weights come from a running one's memory (`--load-format remote_instance`).

The joiner drives it all when it starts: nothing is asked of the seed here but what it is. Both must have the same
model, layout and number format. By `transfer_engine` the joiner reads the seed's device memory while the seed serves;
by `nccl` the seed stops generating for the transfer, and its ports are used up, so one joiner at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from yarl import URL

from controller.core.errors import ConfigError
from controller.core.types import Role
from workers.backends.base import NotSupported
from workers.backends.sglang_state import ServerInfo

WAYS = ("transfer_engine", "nccl")
SEEDS = "remote_instance_weight_loader_start_seed_via_transfer_engine"
SAME = ("model_path", "tp_size", "pp_size", "dtype", "quantization", "served_model_name")  # as the seed has them
KEPT_ON = ("enable_pd_role_switch", "enable_memory_saver", "enable_weights_cpu_backup", "enable_metrics")
LAST_PORT = 65_535


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
    arguments = ["--port", str(port)]
    for name in SAME:
        if seed.arguments.get(name) not in (None, ""):
            arguments += [_flag(name), str(seed.arguments[name])]
    arguments += [_flag(name) for name in KEPT_ON if seed.on(name)]
    if seed.on("enable_priority_scheduling"):
        arguments.append("--enable-priority-scheduling")
        arguments += ["--schedule-low-priority-values-first"] * seed.low_first
    arguments += _role(seed, role)
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


def _nccl(seed: ServerInfo, ports: Sequence[int]) -> list[str]:
    ranks = int(seed.arguments.get("tp_size") or 1)
    if int(seed.arguments.get("dp_size") or 1) != 1:
        raise NotSupported("SGLang cannot send weights by nccl because the seed has data-parallel ranks.", "dp_size")
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
