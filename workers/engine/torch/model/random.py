"""Generates random models in Hugging Face layout, for tests and benchmarks of the engine.

    python -m workers.engine.torch.model.random MODEL --layers 4 --hidden 256

Weights are normal with variance 1 / inputs (norms are around 1), which keeps activations near one and makes every token
depend on the whole context. The output is noise; time and memory are those of a trained model of the same shape.
Without a tokenizer file, the engine uses one token for each byte.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workers.engine.model_config import FAMILIES, parse_config
from workers.engine.torch.model.transformer import Model
from workers.engine.torch.weights.files import INDEX, SINGLE


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """The content of config.json, with the keys that the transformers library writes for the architecture."""
    config = {
        "architectures": [args.architecture],
        "model_type": _model_type(args.architecture),
        "vocab_size": args.vocabulary,
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate or args.hidden * 7 // 2,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim or args.hidden // args.heads,
        "max_position_embeddings": args.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": args.tied,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": args.eos,
        "dtype": args.dtype,
    }
    if args.rope_factor:
        scaled = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": args.rope_factor, "low_freq_factor": 1.0}
        scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": args.rope_original}
        config["rope_parameters"] = scaled
    if args.architecture == "MixtralForCausalLM":
        config |= {"num_local_experts": args.experts, "num_experts_per_tok": args.experts_per_token}
    elif args.architecture == "Qwen3MoeForCausalLM":
        config |= {"num_experts": args.experts, "num_experts_per_tok": args.experts_per_token, "norm_topk_prob": True}
        config |= {
            "moe_intermediate_size": config["intermediate_size"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _model_type(architecture: str) -> str:
    name = architecture.removesuffix("ForCausalLM")
    return {"Qwen3Moe": "qwen3_moe"}.get(name, name.lower())


def write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_model(
    folder: Path, config: dict[str, Any], seed: int = 0, shard_bytes: int = 1 << 32, device: str = "cpu"
) -> int:
    """Write config.json and the weights, in shards of about `shard_bytes`. Returns the total bytes of the tensors.

    `device`: where the values are drawn; another kind of device draws others, and large models much faster.
    """
    parsed = parse_config(config)
    write_config(folder, config)
    dtype = getattr(torch, parsed.dtype)
    shapes = {name: slot.shape for name, slot in Model(parsed, torch.device("meta"), dtype).slots().items()}
    generator = torch.Generator(device).manual_seed(seed)
    files = {}
    shards = list(_shards(shapes, dtype.itemsize, shard_bytes))
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _random(name, shapes[name], dtype, generator) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(names, file))
    total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _shards(shapes: dict[str, tuple[int, ...]], itemsize: int, most: int) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * itemsize
        if names and held + size > most:
            yield names
            names, held = [], 0
        names.append(name)
        held += size
    yield names


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    if "norm" in name:
        return (1 + 0.1 * drawn).to(dtype).cpu()
    inputs = 1 if "embed" in name else shape[-1]
    return (drawn * inputs**-0.5).to(dtype).cpu()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workers.engine.torch.model.random", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("folder", type=Path)
    add("--architecture", default="LlamaForCausalLM", choices=sorted(FAMILIES))
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--intermediate", type=int, help="width of the feed-forward layer or of one expert (3.5 times --hidden)")
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--head-dim", type=int, help="(--hidden / --heads)")
    add("--vocabulary", type=int, default=1024)
    add("--context", type=int, default=8192, help="longest sequence, tokens")
    add("--experts", type=int, default=8)
    add("--experts-per-token", type=int, default=2)
    add("--eos", type=int, help="id of the token that ends a sequence (none)")
    add("--rope-factor", type=float, default=0.0, help="stretch long wavelengths as Llama 3.1 does (0: not)")
    add("--rope-original", type=int, default=8192, help="context before stretching, tokens (%(default)s)")
    add("--tied", action="store_true", help="use the embedding as output layer")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--shard-mb", type=int, default=4096, help="largest file of weights in MB (%(default)s)")
    add("--seed", type=int, default=0)
    add("--device", default="cpu", choices=["cpu", "cuda"], help="where values are drawn (%(default)s)")
    args = parser.parse_args(argv)
    try:
        size = write_model(args.folder, config_of(args), args.seed, args.shard_mb << 20, args.device)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.architecture} of {size / 1e6:.1f} MB in {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
