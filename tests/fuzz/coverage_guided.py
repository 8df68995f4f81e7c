"""`python -m tests.fuzz.coverage_guided [NAME|all] SECONDS`: atheris feeds a target (`targets`) what reaches new code.

It ends with libFuzzer's status: 0 once the time is over, another at the first error, which is printed with its input.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import atheris

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
import django

django.setup()

OURS = ("workers.backends", "workers.http", "workers.engine", "workers.actions", "api.openai", "controller.core")
with atheris.instrument_imports(include=[*OURS, "controller.services"]):
    from tests.fuzz import tokenizing  # noqa: F401  # adds its targets
    from tests.fuzz.targets import SEEDS, TARGETS

NAMES = sorted(TARGETS)


def one_of_all(data: bytes) -> None:
    if data:
        TARGETS[NAMES[data[0] % len(NAMES)]](data[1:])


def main() -> None:
    name, seconds = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory(prefix="slackline-fuzz-") as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for index, each in enumerate(NAMES if name == "all" else [name]):
            for number, seed in enumerate(SEEDS[each]):
                head = bytes([index]) if name == "all" else b""
                (corpus / f"{index}-{number}").write_bytes(head + seed)
        options = [f"-max_total_time={seconds}", "-print_final_stats=1", "-max_len=4096", "-timeout=10"]
        atheris.Setup(
            [sys.argv[0], str(corpus), f"-artifact_prefix={folder}/", "-rss_limit_mb=1500", *options],
            one_of_all if name == "all" else TARGETS[name],
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
