"""The name of the machine that a figure was measured on, for folders and files, and where figures are stored."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEASUREMENTS = Path(__file__).resolve().parents[2] / "docs" / "measurements"


def machine_name(accelerator: str = "") -> str:
    """Processor model and number of cores, such as `intel-xeon-processor-2-cores`, and the accelerator's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
    words = slug((models or ["unknown"])[0])
    return "-".join(filter(None, [words, str(os.cpu_count() or 0), "cores", slug(accelerator)]))


def slug(words: str) -> str:
    return "-".join(re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)", " ", words.lower())))


def keep(benchmark: str, result: Mapping[str, Any], accelerator: str = "", root: Path = MEASUREMENTS) -> Path:
    """Write a benchmark's JSON to `root/BENCHMARK/MACHINE.json`, replacing the previous one."""
    path = root / benchmark / f"{machine_name(accelerator)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return path
