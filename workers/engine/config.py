"""The engine's command line: the only place where it is configured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from controller.core.errors import ConfigError
from controller.core.types import Role
from controller.engine import EngineConfig
from controller.policies.batching import BATCHINGS, Batching
from workers.engine.profiles import Profile, load_profile

DEFAULT_PROFILE = "llama-3.1-8b-a100"
DEFAULT_MAX_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Times are seconds."""

    host: str
    port: int
    model: str
    role: Role
    seed: int
    profile: Profile
    engine: EngineConfig
    batching: Batching
    startup_delay: float
    shutdown_timeout: float


def parse(argv: Sequence[str] | None = None) -> ServerConfig:
    """Exits with a message naming the option when one is wrong."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return _config(args)
    except ConfigError as error:
        option = f"--{error.field.replace('_', '-')}: " if error.field else ""
        parser.error(f"{option}{error}")


def _config(args: argparse.Namespace) -> ServerConfig:
    profile = load_profile(args.profile)
    if args.role != Role.COLLOCATED:
        raise ConfigError(f"{args.role!r} needs KV transfer between engines, which this engine does not have", "role")
    return ServerConfig(
        host=args.host,
        port=args.port,
        model=args.model or profile.model,
        role=Role(args.role),
        seed=args.seed,
        profile=profile,
        engine=_engine_config(args, profile),
        batching=_batching(args.batching, args.long_prefill_token_threshold),
        startup_delay=args.startup_delay,
        shutdown_timeout=args.shutdown_timeout,
    )


def _batching(name: str, threshold: int | None) -> Batching:
    policy = BATCHINGS[name]
    if threshold is None:
        return policy()
    if "long_prefill_tokens" not in policy.Config.__dataclass_fields__:
        raise ConfigError(f"{name} batching does not cut prompts", "long_prefill_token_threshold")
    if threshold < 1:
        raise ConfigError(f"must be at least 1, got {threshold}", "long_prefill_token_threshold")
    return policy(policy.Config(long_prefill_tokens=threshold))


def _engine_config(args: argparse.Namespace, profile: Profile) -> EngineConfig:
    blocks = args.kv_blocks or max(1, profile.kv_capacity_tokens // max(1, args.block_size))
    capacity = blocks * args.block_size
    return EngineConfig(
        kv_blocks=blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens or max(2048, args.max_num_seqs),
        max_model_len=args.max_model_len or min(DEFAULT_MAX_MODEL_LEN, capacity),
        scheduling_policy=args.scheduling_policy,
        max_waiting=args.max_num_queued_reqs,
        prefix_caching=args.enable_prefix_caching,
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 86400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workers.engine",
        description="Slackline's reference engine: vLLM's HTTP dialect over an emulated device.",
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, required=True, help="0 takes a free port")
    add("--profile", default=DEFAULT_PROFILE, help="a shipped profile, constant:5ms, or a .json file (%(default)s)")
    add("--role", default="collocated", choices=[role.value for role in Role])
    add("--model", default="", help="served model name (the profile's)")
    add("--seed", type=int, default=0, help="of the pseudo-text, for requests without a seed")
    add("--max-num-seqs", type=int, default=64, help="running sequences at a time (%(default)s)")
    add("--max-num-batched-tokens", type=int, help="token budget of a step (2048, at least --max-num-seqs)")
    add("--max-model-len", type=int, help=f"context in tokens ({DEFAULT_MAX_MODEL_LEN} or what the KV cache holds)")
    add("--kv-blocks", type=int, help="KV cache size in blocks (from the profile)")
    add("--block-size", type=int, default=16, help="tokens a KV block (%(default)s)")
    add("--scheduling-policy", default="priority", choices=["priority", "fcfs"])
    add("--long-prefill-token-threshold", type=int, help="largest prefill chunk of one prompt (the token budget)")
    add("--batching", default="chunked_prefill", choices=list(BATCHINGS))
    add("--max-num-queued-reqs", type=int, help="refuse with 503 beyond that many waiting requests (no bound)")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--startup-delay", type=_seconds, default=0.0, help="seconds before the port opens, as if loading weights")
    add("--shutdown-timeout", type=_seconds, default=5.0, help="seconds running requests get after SIGTERM")
    return parser
