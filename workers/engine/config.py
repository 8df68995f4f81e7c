"""The command line of the reference engine, which is its whole configuration."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError
from controller.core.types import Role
from controller.engine import EngineConfig, PreemptionConfig
from controller.engine.kv_costs import MeasuredCosts
from controller.policies.batching import BATCHINGS, Batching
from controller.policies.batching.options import build as build_batching
from controller.policies.by_stage import EnginePart
from workers.engine.emulated_swap import EmulatedSwap
from workers.engine.model_options import ModelOptions, add_model_options, block_bytes, model_options
from workers.engine.profiles import Profile, load_profile
from workers.engine.scheduler_choice import BATCHING as PREEMPTIVE_BATCHING
from workers.engine.scheduler_choice import add_scheduler_options, choose_by_stage, preemption_config
from workers.engine.text.tokenizer import ChunkTokenizer, Tokenizer
from workers.engine.weights.host_copy import HostCopy
from workers.engine.weights.manager import KINDS as SOURCES
from workers.environment import read_variable
from workers.http.fleet_proof import KEY_VARIABLE, authority

DEFAULT_PROFILE = "llama-3.1-8b-a100"
DEFAULT_BATCHING = "chunked_prefill"
DEFAULT_MAX_MODEL_LEN = 8192
PORT_MAX = 65_535


@dataclass(frozen=True, slots=True)
class KvConfig:
    """Settings of KV transfers. `port`: 0 takes a free one; `token`: the fleet's secret (FLEET_TOKEN); `reached_at`:
    the host name or address under which other engines reach this one; `token_bytes`: of one token in one layer;
    `flow_socket`: of the transfer daemon (FLOW_SOCKET), "" without flow scheduling; `borrow_tokens`: uncached tokens
    from which on other engines are asked for a prompt's prefix, 0: never."""

    token: str
    reached_at: str
    port: int
    layers: int
    token_bytes: int
    lease_s: float
    timeout_s: float
    flow_socket: str = ""
    borrow_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WeightConfig:
    """`present`: False for a warm spare, which gets its weights by /weights/load. `host_copy`: the folder in which
    engines of this host share a copy of a real model's weights (None: they do not); `keep_room`: a real model's memory
    is allocated and touched even without weights. `load_s` (seconds by source) and `nbytes` are for emulated
    weights."""

    present: bool
    load_s: Mapping[str, float]
    nbytes: int
    timeout_s: float
    host_copy: Path | None = None
    keep_room: bool = False


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The whole configuration. Times are seconds."""

    host: str
    port: int
    model: str
    role: Role
    seed: int
    profile: Profile | None  # None: a real model whose times are not measured
    engine: EngineConfig
    batching: Batching
    preemption: PreemptionConfig | None  # None: continuous batching
    startup_delay: float
    shutdown_timeout: float
    kv: KvConfig
    weights: WeightConfig
    by_stage: bool = False  # the role chose the scheduler, and another role exchanges it
    deadlines: bool = False
    batching_options: Mapping[str, Any] = field(default_factory=dict)  # set explicitly, so no measurement changes them
    torch: ModelOptions | None = None
    tokenizer: Tokenizer = field(default_factory=ChunkTokenizer)
    costs: MeasuredCosts | None = None  # measured before the engine serves
    swap: EmulatedSwap | None = None  # of an emulated engine
    program: Any = None  # the loaded model (`workers.engine.torch.task.OperatorProgram`)
    host_copy: HostCopy | None = None  # opened before the model was read
    group: Any = None  # the other ranks (`workers.engine.torch.group.RankGroup`)
    api_key: str = field(default="", repr=False)  # that callers must send; "": they need none
    urls: tuple[str, ...] = ()  # host and port under which it is registered, if a proxy stands in front

    @property
    def no_kv_transfers(self) -> str:
        """Why this engine has no KV transfers; "" if it has."""
        if self.group is not None:
            return "each of its tensor-parallel ranks holds a part of it"
        return "" if self.kv.token else "it was started without FLEET_TOKEN"


def parse(argv: Sequence[str] | None = None) -> ServerConfig:
    """The configuration. Exits with a message naming the option if one is invalid."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return _config(args)
    except ConfigError as error:
        name = error.field or ""
        option = f"--{name.replace('_', '-')}: " if name and not name.isupper() else ""  # variables are in the message
        parser.error(f"{option}{error}")


def _config(args: argparse.Namespace) -> ServerConfig:
    model = model_options(args)
    profile = None if model and not args.profile else load_profile(args.profile or DEFAULT_PROFILE)
    part = choose_by_stage(args)
    preemption = preemption_config(args)
    engine, options = _engine_config(args, model, profile), _options(args.batching_options)
    return ServerConfig(
        host=args.host,
        port=args.port,
        model=args.served_model_name or _name(args, model, profile),
        role=Role(args.role),
        seed=args.seed,
        profile=profile,
        engine=engine,
        swap=_emulated_swap(args) if model is None and engine.swap_blocks else None,
        batching=_batching(args, part, profile, engine, options),
        batching_options=options,
        preemption=preemption,
        by_stage=part is not None,
        deadlines=args.deadlines,
        startup_delay=args.startup_delay,
        shutdown_timeout=args.shutdown_timeout,
        kv=_kv_config(args),
        weights=_weight_config(args),
        torch=model,
        api_key=_api_key(args.api_key),
        urls=_urls(args.advertise_url),
    )


def _name(args: argparse.Namespace, model: ModelOptions | None, profile: Profile | None) -> str:
    if model is not None:
        return model.folder.resolve().name
    return args.model or (profile.model if profile else "")


def _kv_config(args: argparse.Namespace) -> KvConfig:
    token = read_variable(os.environ, "FLEET_TOKEN")
    if args.role != Role.COLLOCATED and not token:
        raise ConfigError(f"role {args.role} needs KV transfers: set FLEET_TOKEN, the same in the whole fleet", "role")
    if min(args.kv_layers, args.kv_token_bytes) < 1:
        raise ConfigError("kv_layers and kv_token_bytes must be at least 1", "kv_layers")
    if args.borrow_tokens < 0:
        raise ConfigError("must be at least 0", "borrow_tokens")
    if args.borrow_tokens and not token:
        raise ConfigError("needs KV transfers: set FLEET_TOKEN, the same in the whole fleet", "borrow_tokens")
    return KvConfig(
        *(token, _reached_at(args), args.kv_port, args.kv_layers, args.kv_token_bytes, args.kv_lease, args.kv_timeout),
        flow_socket=read_variable(os.environ, "FLOW_SOCKET"),
        borrow_tokens=args.borrow_tokens,
    )


def _api_key(option: str) -> str:
    key = option or read_variable(os.environ, KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("must be visible ASCII without spaces", "api_key")
    return key


def _urls(url: str) -> tuple[str, ...]:
    if not url:
        return ()
    try:
        if url.startswith(("http://", "https://")):
            return (authority(url),)
    except ValueError:
        pass
    raise ConfigError(f"must be a URL such as https://engine.example, got {url}", "advertise_url")


def _reached_at(args: argparse.Namespace) -> str:
    """The address for other engines. An engine that listens on all addresses is reached by its host's name."""
    everywhere = args.host in ("0.0.0.0", "::", "")
    return str(args.advertise_host or (socket.gethostname() if everywhere else args.host))


def _weight_config(args: argparse.Namespace) -> WeightConfig:
    load_s = dict.fromkeys(SOURCES, 0.0)
    for item in filter(None, args.emulated_load_s.split(",")):
        source, _, seconds = item.partition("=")
        if source not in SOURCES:
            raise ConfigError(f"unknown source {source!r}; valid: {', '.join(SOURCES)}", "emulated_load_s")
        try:
            load_s[source] = _seconds(seconds)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{item}: {error}", "emulated_load_s") from error
    shared = Path(args.host_copy) if args.host_copy else None
    if shared is not None and (args.executor != "torch" or args.tensor_parallel > 1):
        raise ConfigError("requires --executor torch and one rank", "host_copy")
    if shared is not None and not shared.is_dir():
        raise ConfigError(f"{shared} is not a folder", "host_copy")
    if args.keep_room and (args.executor != "torch" or args.tensor_parallel > 1):
        raise ConfigError("requires --executor torch and one rank", "keep_room")
    nbytes, timeout_s = args.emulated_weight_bytes, args.kv_timeout
    return WeightConfig(args.weights == "present", load_s, nbytes, timeout_s, shared, args.keep_room)


def _options(text: str) -> dict[str, Any]:
    """The value of `--batching-options`. Raises ConfigError."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not JSON: {error}", "batching_options") from error
    if not isinstance(found, dict):
        raise ConfigError(f'must be an object such as {{"slots": 96}}, got {text}', "batching_options")
    return found


def _batching(
    args: argparse.Namespace,
    part: EnginePart | None,
    profile: Profile | None,
    engine: EngineConfig,
    explicit: Mapping[str, Any],
) -> Batching:
    """The batching policy. `part`: options of the combined set; `explicit`: options of the command line, which take
    precedence."""
    name = args.batching or (PREEMPTIVE_BATCHING if args.scheduler == "preemptive" else DEFAULT_BATCHING)
    options: dict[str, Any] = {}
    if part is not None:
        options = part.options_for(profile.coefficients if profile else None, engine.max_num_batched_tokens)
    threshold = args.long_prefill_token_threshold
    if threshold is not None:
        if "long_prefill_tokens" not in BATCHINGS[name].Config.__dataclass_fields__:
            raise ConfigError(f"{name} batching does not cut prompts", "long_prefill_token_threshold")
        if threshold < 1:
            raise ConfigError(f"must be at least 1, got {threshold}", "long_prefill_token_threshold")
        if "long_prefill_tokens" in explicit:
            raise ConfigError("is also set in --batching-options", "long_prefill_token_threshold")
        options["long_prefill_tokens"] = threshold
    try:
        return build_batching(name, {**options, **explicit}, "batching_options")
    except ConfigError as error:
        where = (error.field or "").removeprefix("batching_options").lstrip(".")
        raise ConfigError(f"{where}: {error}" if where else str(error), "batching_options") from error


def _engine_config(args: argparse.Namespace, model: ModelOptions | None, profile: Profile | None) -> EngineConfig:
    if model is not None:
        blocks, longest = model.kv_blocks, model.config.max_positions
    else:
        held = profile.kv_capacity_tokens if profile else 0
        blocks, longest = args.kv_blocks or max(1, held // max(1, args.block_size)), sys.maxsize
    if model is not None and args.max_model_len is not None and args.max_model_len > longest:
        raise ConfigError(f"{args.max_model_len} is beyond the model's {longest} positions", "max_model_len")
    if args.context_tokens is not None and args.context_tokens < 1:
        raise ConfigError(f"must be at least 1, got {args.context_tokens}", "context_tokens")
    wanted = args.context_tokens or DEFAULT_MAX_MODEL_LEN
    capacity = blocks * args.block_size
    return EngineConfig(
        kv_blocks=blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or max(2048, args.max_num_seqs),
        max_model_len=args.max_model_len or min(wanted, longest, capacity),
        scheduling_policy=args.scheduling_policy,
        max_waiting=args.max_num_queued_reqs,
        prefix_caching=args.enable_prefix_caching,
        swap_blocks=_swap_blocks(args, model),
    )


def _swap_blocks(args: argparse.Namespace, model: ModelOptions | None) -> int:
    """Blocks of host memory for evicted sequences."""
    if not args.swap_bytes:
        return 0
    if args.swap_bytes < 0:
        raise ConfigError(f"must be at least 0, got {args.swap_bytes}", "swap_bytes")
    if args.tensor_parallel > 1:
        raise ConfigError("requires one rank", "swap_bytes")
    if args.scheduler == "preemptive":
        raise ConfigError("the preemptive scheduler evicts no sequence", "swap_bytes")
    size = _emulated_swap(args).block_bytes if model is None else block_bytes(model, args.block_size)
    if args.swap_bytes < size:
        raise ConfigError(f"{args.swap_bytes} bytes are less than one KV block of {size} bytes", "swap_bytes")
    return int(args.swap_bytes // size)


def _emulated_swap(args: argparse.Namespace) -> EmulatedSwap:
    if not args.emulated_swap_bytes_per_s > 0:
        raise ConfigError("must be positive", "emulated_swap_bytes_per_s")
    size = args.kv_layers * args.kv_token_bytes * max(1, args.block_size)
    return EmulatedSwap(size, args.emulated_swap_bytes_per_s)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return value


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= PORT_MAX):
        raise argparse.ArgumentTypeError(f"{text} is not a port: 0 (any that is free) to {PORT_MAX}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workers.engine",
        description="Slackline's reference engine: vLLM's HTTP interface with an emulated device or a real model.",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=_port, required=True, help="0 takes a free port")
    add("--profile", help=f"shipped profile, constant:5ms, or .json file ({DEFAULT_PROFILE}; torch: measured)")
    add("--role", default="collocated", choices=[role.value for role in Role])
    add("--model", default="", help="served model name (the profile's); torch: folder of the model")
    add("--seed", type=int, default=0, help="seed of generated text for requests without a seed (%(default)s)")
    add("--max-num-seqs", type=int, default=64, help="largest number of running sequences (%(default)s)")
    add("--max-num-batched-tokens", type=int, help="token budget of a step (2048, at least --max-num-seqs)")
    add("--max-model-len", type=int, help=f"context in tokens ({DEFAULT_MAX_MODEL_LEN} or what the KV cache holds)")
    add("--context-tokens", type=int, help="without --max-model-len: context in tokens, or less if less fits (8192)")
    add("--kv-blocks", type=int, help="KV cache size in blocks (from the profile)")
    add("--block-size", type=int, default=16, help="tokens of a KV block (%(default)s)")
    add("--scheduling-policy", default="priority", choices=["priority", "fcfs"])
    add("--long-prefill-token-threshold", type=int, help="largest prefill chunk of one prompt (the token budget)")
    add("--batching", choices=list(BATCHINGS), help=f"batching policy ({DEFAULT_BATCHING})")
    add("--batching-options", default="{}", help='settings of the batching policy as JSON, such as {"slots": 96}')
    add("--swap-bytes", type=int, default=0, help="host memory for the KV of evicted sequences (0: recompute them)")
    add("--emulated-swap-bytes-per-s", type=float, default=16e9, help="emulated link to that memory (%(default)s)")
    add("--max-num-queued-reqs", type=int, help="refuse with 503 beyond this many waiting requests (no limit)")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--advertise-host", default="", help="address of this engine for other engines (--host, or the host's name)")
    add("--api-key", default="", help=f"key that callers must send as a bearer token ({KEY_VARIABLE}, unseen by ps)")
    add("--advertise-url", default="", help="URL under which this engine is registered, if a proxy stands in front")
    add("--kv-port", type=_port, default=0, help="port from which other engines pull KV; 0 takes a free port")
    add("--kv-layers", type=int, default=32, help="layers of the emulated KV (%(default)s)")
    add("--kv-token-bytes", type=int, default=4096, help="emulated KV: bytes of a token in a layer (%(default)s)")
    add("--kv-lease", type=_seconds, default=30.0, help="seconds KV is kept for a decode engine (%(default)s)")
    add("--kv-timeout", type=_seconds, default=30.0, help="seconds one KV transfer may take (%(default)s)")
    add("--borrow-tokens", type=int, default=0, help="ask other engines for prefixes of so many tokens (0: none)")
    add("--weights", default="present", choices=["present", "absent"], help="absent: a warm spare without weights")
    add("--host-copy", default="", help="torch: folder in which engines of this host share weights (/dev/shm; none)")
    add(
        "--keep-room",
        action="store_true",
        help="torch: keep the memory of absent weights allocated, for faster loads",
    )
    add("--emulated-load-s", default="", help="seconds of an emulated weight load: engine=0.9,host=2.7,disk=4.1")
    add("--emulated-weight-bytes", type=int, default=16_060_000_000, help="size of emulated weights (%(default)s)")
    add_scheduler_options(parser)
    add_model_options(parser)
    add("--startup-delay", type=_seconds, default=0.0, help="seconds before the port opens, as an emulated weight load")
    add("--shutdown-timeout", type=_seconds, default=5.0, help="seconds for running requests after SIGTERM")
    return parser
