"""Command-line options of engines with a real model. This module reads config.json and does not import torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from controller.core.errors import ConfigError
from workers.engine.model_config import DTYPES, TransformerConfig, read_config
from workers.engine.weights.checkpoint_identity import marks_of

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEFAULT_KV_GIB = 1.0


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """`kv_blocks`: number of blocks in `--kv-cache-gib`. `threads`: of one operator on the CPU (None: torch decides).

    `ranks`: processes that share the model, each with its part of every layer and of the KV cache. `marks`: of the
    checkpoint's files before anything was read (`checkpoint_identity`), to notice a change while it is read.
    """

    folder: Path
    config: TransformerConfig
    device: str
    dtype: str
    threads: int | None
    kv_blocks: int
    ranks: int = 1
    marks: tuple[str, ...] = ()


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--executor", default="emulated", choices=["emulated", "torch"], help="torch runs a real model (`make torch`)")
    add("--served-model-name", default="", help="model name in requests (--model; with torch, its last folder)")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="torch: device of the model (%(default)s)")
    add("--dtype", default="auto", choices=["auto", *DTYPES], help="torch: type of weights and KV (config.json's)")
    add("--threads", type=int, help="torch: CPU threads of one operator (torch decides)")
    add("--kv-cache-gib", type=float, default=DEFAULT_KV_GIB, help="torch: KV cache size of a rank (%(default)s)")
    add("--tensor-parallel", type=int, default=1, help="torch: ranks (processes) that share the model (%(default)s)")


def model_options(args: argparse.Namespace) -> ModelOptions | None:
    """The options; None for the emulated executor. Raises ConfigError naming the option."""
    if args.tensor_parallel < 1:
        raise ConfigError(f"must be at least 1, got {args.tensor_parallel}", "tensor_parallel")
    if args.executor == "emulated":
        if args.tensor_parallel > 1:
            raise ConfigError("requires --executor torch", "tensor_parallel")
        return None
    if args.tensor_parallel > 1 and args.role != "collocated":
        raise ConfigError(
            "engines of several ranks have no KV transfers, so the role must be collocated", "tensor_parallel"
        )
    if not args.model:
        raise ConfigError("the torch executor requires the folder of a model", "model")
    if args.threads is not None and args.threads < 1:
        raise ConfigError(f"must be at least 1, got {args.threads}", "threads")
    folder = Path(args.model)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder", "model")
    marks = marks_of(folder)
    config = read_config(folder)
    dtype = config.dtype if args.dtype == "auto" else args.dtype
    ranks = args.tensor_parallel
    if config.kv_heads % ranks:
        raise ConfigError(f"kv_heads={config.kv_heads} cannot be split over {ranks} ranks", "tensor_parallel")
    block = _block_bytes(config, dtype, max(1, args.block_size)) // ranks
    blocks = int(args.kv_cache_gib * (1 << 30)) // block
    if blocks < 1:
        raise ConfigError(f"{args.kv_cache_gib} GiB is less than one block of {block} bytes", "kv_cache_gib")
    return ModelOptions(folder, config, args.device, dtype, args.threads, args.kv_blocks or blocks, ranks, marks)


def block_bytes(options: ModelOptions, block_size: int) -> int:
    """Bytes of a KV block in all layers and ranks."""
    return _block_bytes(options.config, options.dtype, block_size)


def _block_bytes(config: TransformerConfig, dtype: str, block_size: int) -> int:
    return config.kv_bytes_per_token(ELEMENT_BYTES[dtype]) * block_size
