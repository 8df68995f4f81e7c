"""Shapes of the random models that benchmarks run, by name, and the devices they run on (`--shape`, `--device`)."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from controller.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class TorchShape:
    """Shape of a Llama-style transformer. `feed_forward`: width of the feed-forward layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    feed_forward: int

    @property
    def parameters(self) -> int:
        """Number of parameters of attention, feed-forward layers, both embeddings and norms."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * head
        layer = attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    def options(self, context: int, dtype: str) -> tuple[str, ...]:
        """Options for `workers.engine.torch.model.random`."""
        return (
            *("--layers", str(self.layers), "--hidden", str(self.hidden), "--intermediate", str(self.feed_forward)),
            *("--heads", str(self.heads), "--kv-heads", str(self.kv_heads), "--vocabulary", str(self.vocabulary)),
            *("--context", str(context), "--dtype", dtype),
        )


# All have Llama-3's proportions: feed-forward 3.5 times the width, four query heads per KV head.
SHAPES = {
    "tiny": TorchShape(layers=2, hidden=64, heads=4, kv_heads=2, vocabulary=1024, feed_forward=224),
    "thin": TorchShape(layers=6, hidden=384, heads=8, kv_heads=2, vocabulary=4096, feed_forward=1344),
    "half-billion": TorchShape(layers=9, hidden=2048, heads=16, kv_heads=4, vocabulary=8192, feed_forward=7168),
    "llama-8b": TorchShape(layers=32, hidden=4096, heads=32, kv_heads=8, vocabulary=128_256, feed_forward=14_336),
}


def add_shape_options(parser: argparse.ArgumentParser, shape: str) -> None:
    sizes = ", ".join(f"{name} {found.parameters / 1e9:.3g}e9" for name, found in SHAPES.items())
    parser.add_argument("--shape", default=shape, choices=SHAPES, help=f"parameters: {sizes} (%(default)s)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device of the models (%(default)s)")
    kept = "keep the random model here, and use the one that is here (default: it is written again and removed)"
    parser.add_argument("--model-folder", type=Path, metavar="DIR", help=kept)
    parser.add_argument("--dtype", choices=DTYPES, help="number format of the weights (bfloat16 on CUDA)")


def devices(device: str) -> int:
    """How many devices of this kind the machine has; 1 for CPUs.

    Raises ConfigError naming the option if there is none.
    """
    import torch

    if device == "cpu":
        return 1
    if not torch.cuda.is_available():
        raise ConfigError(f"PyTorch {torch.__version__} finds no CUDA device here", field="device")
    return torch.cuda.device_count()


def device_words(device: str) -> str:
    """The accelerator's name, such as `NVIDIA H100 80GB HBM3`; "" for the CPU."""
    import torch

    return str(torch.cuda.get_device_name(0)) if device == "cuda" else ""


def checked(
    parser: argparse.ArgumentParser, args: argparse.Namespace, cpu_dtype: str = "float32"
) -> argparse.Namespace:
    """Fill in `dtype`; end the program with the option's name if there is no such device."""
    try:
        devices(args.device)
    except ConfigError as error:
        parser.error(f"--{error.field}: {error}")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else cpu_dtype)
    return args


def random_model(args: argparse.Namespace, folder: Path, context: int) -> tuple[Path, int]:
    """A random model for prompts of up to `context` tokens. Returns its folder and the bytes of its weight files.

    It is written to `folder`; with `--model-folder` to that one, unless one of the same shape and number format is
    there. Raises ConfigError for a folder with another model that is not of a benchmark.
    """
    from workers.engine.torch.model.random import main as make
    from workers.engine.torch.model.random import write_config

    folder = args.model_folder or folder
    written, parameters = folder / "config.json", SHAPES[args.shape].options(context, args.dtype)
    kind = f"{args.shape} {args.dtype}"
    marked = folder / "shape.txt"  # written last, so that half a model is written again
    if marked.is_file() and marked.read_text() == kind:
        config = json.loads(written.read_text())
        write_config(folder, config | {"max_position_embeddings": max(context, config["max_position_embeddings"])})
    else:
        if written.exists() and not marked.exists():
            raise ConfigError(f"{folder} has a model that no benchmark wrote", field="model_folder")
        for old in (marked, *folder.glob("*.safetensors*")):
            old.unlink(missing_ok=True)
        make([str(folder), *parameters, "--device", args.device])
        marked.write_text(kind)
    return folder, sum(path.stat().st_size for path in folder.glob("*.safetensors"))
