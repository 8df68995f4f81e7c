"""The machine that a figure was measured on, as the name of its folder."""

from __future__ import annotations

import os
import re
from pathlib import Path


def machine_name() -> str:
    """Processor model and number of cores, such as `intel-xeon-processor-2-cores`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((r|tm)\)", " ", (models or ["unknown"])[0].lower()))
    return "-".join([*words, str(os.cpu_count() or 0), "cores"])
