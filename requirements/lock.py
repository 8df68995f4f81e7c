"""The lock: every package that is installed, transitive ones too, at one version and with the hashes of its files.

`renew` resolves the requirements of this folder and writes lock.txt, and for environments of their own vllm-lock.txt
and ray-lock.txt; `pick SETS` prints what `pip install --require-hashes` needs for some of lock.txt, `audit` asks a
vulnerability database about all of them. torch is in none of the files: its CPU and CUDA builds are different files
under one version, and an index decides between them.
Standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOCK = HERE / "lock.txt"
VLLM_LOCK = HERE / "vllm-lock.txt"
RAY_LOCK = HERE / "ray-lock.txt"
SETS = ("base", "tokenizers", "dev", "torch", "torch-dev", "fuzz", "supply")
PYTHON = "3.11"  # the oldest that is supported; markers in the lock cover the newer ones
CUDA = re.compile(r"(torch|triton|cuda-.*|nvidia-.*)$")
FOR = "    # for: "
HEADER = "# Written by `make lock`; `make` installs from it. Change the requirements beside it, not this file.\n"


def name_of(line: str) -> str:
    """The normalised name of the package that a line of requirements begins with."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]).lower()


def entries(text: str) -> list[str]:
    """The requirements of a lock, each with the lines of its hashes; a package may have one for each Python."""
    found: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith((" ", "\t")):
            found[-1] += line
        elif line.strip() and not line.startswith("#"):
            found.append(line)
    return found


def sets_of(entry: str) -> set[str]:
    """The sets that need an entry of lock.txt."""
    return set(entry.rpartition(FOR)[2].split())


def pick(sets: list[str], without: list[str], text: str | None = None) -> str:
    """The part of the lock that these sets need, as a file of requirements. Raises KeyError for an unknown set."""
    unknown = set(sets) - set(SETS)
    if unknown:
        raise KeyError(f"unknown sets {sorted(unknown)}; known: {', '.join(SETS)}")
    left_out = {name_of(name) for name in without}
    chosen = [
        entry.rpartition(FOR)[0]
        for entry in entries(LOCK.read_text() if text is None else text)
        if sets_of(entry) & set(sets) and name_of(entry) not in left_out
    ]
    return "".join(chosen)


def compiled(uv: str, files: list[Path], *options: str) -> str:
    """What uv resolves the files to, for every Python and processor at once. No name of an index is written."""
    command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", *options, *map(str, files)]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def renew(uv: str, upgrade: bool) -> None:
    """Write all locks. Without `upgrade` packages keep their locked versions where the requirements allow it."""
    files = {name: HERE / f"{name}.txt" for name in SETS}
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        if LOCK.exists() and not upgrade:
            pins.write_text(LOCK.read_text())
        compiled(uv, list(files.values()), "--generate-hashes", "--output-file", str(pins))
        whole = pins.read_text()
        needed = {
            name: {name_of(entry) for entry in entries(compiled(uv, [path], "--constraint", str(pins)))}
            for name, path in files.items()
        }
    kept = [entry for entry in entries(whole) if not CUDA.match(name_of(entry))]
    LOCK.write_text(
        HEADER
        + "".join(f"{each}{FOR}{' '.join(name for name in SETS if name_of(each) in needed[name])}\n" for each in kept)
    )
    sources = [HERE / "vllm-constraints.txt", HERE / "vllm.txt"]
    every = entries(compiled(uv, sources, "--no-deps", "--generate-hashes"))
    VLLM_LOCK.write_text(HEADER + "".join(entry for entry in every if name_of(entry) != "torch"))
    renew_ray(uv, upgrade)


def renew_ray(uv: str, upgrade: bool) -> None:
    """Write the lock of Ray's own environment, which is resolved by itself."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "pins.txt"
        if RAY_LOCK.exists() and not upgrade:
            pins.write_text(RAY_LOCK.read_text())
        compiled(uv, [HERE / "ray.txt"], "--generate-hashes", "--output-file", str(pins))
        RAY_LOCK.write_text(HEADER + pins.read_text())


def audit(pip_audit: str, must: bool) -> int:
    """Print the known vulnerabilities of what the locks name. 1 if there are any, or with `must` if no database
    answered."""
    command = [pip_audit, "--disable-pip", "--no-deps", "--progress-spinner", "off", "--format", "json"]
    audited: dict[tuple[str, str], dict[str, Any]] = {}
    locks = {LOCK: pick(list(SETS), []), VLLM_LOCK: VLLM_LOCK.read_text(), RAY_LOCK: RAY_LOCK.read_text()}
    for lock, text in locks.items():  # one after the other: they may have a package at different versions
        with tempfile.TemporaryDirectory() as folder:
            packages = Path(folder) / lock.name
            packages.write_text(text)
            done = subprocess.run(
                [*command, "--timeout", "15", "-r", str(packages)],
                text=True,
                capture_output=True,
                check=False,
                timeout=300,
            )
        found, reason = answered(done.stdout, done.stderr)
        if not found:
            print(f"NOT AUDITED: {lock.name}: no vulnerability database answered ({reason})")
            break
        audited |= {(each["name"], each["version"]): each for each in found}
    bad = [(*key, fault["id"]) for key, each in sorted(audited.items()) for fault in each.get("vulns", [])]
    for name, version, fault in bad:
        print(f"{name} {version}: {fault}")
    if audited:
        print(json.dumps({"audited": len(audited), "vulnerabilities": len(bad)}))
    return 1 if bad or (must and not found) else 0


def answered(output: str, log: str) -> tuple[list[dict[str, Any]], str]:
    """The packages that the database knows, from pip-audit's JSON, and why there are none if there are none."""
    try:
        listed = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        return [], (log.strip().splitlines() or ["it printed nothing"])[-1][:300]
    skipped = [each["skip_reason"] for each in listed if "skip_reason" in each]
    return [each for each in listed if "skip_reason" not in each], (skipped or ["it listed no package"])[0][:300]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    renewing = commands.add_parser("renew", help="write the locks")
    renewing.add_argument("--uv", default="uv", help="the program")
    renewing.add_argument("--upgrade", action="store_true", help="take the newest of what the requirements leave open")
    picking = commands.add_parser("pick", help="print what some sets need")
    picking.add_argument("sets", nargs="+", choices=SETS)
    picking.add_argument("--without", action="append", default=[], metavar="PACKAGE")
    auditing = commands.add_parser("audit", help="ask a vulnerability database")
    auditing.add_argument("--pip-audit", default="pip-audit", help="the program")
    auditing.add_argument("--must", action="store_true", help="fail also where no database can be reached")
    told = parser.parse_args(arguments)
    if told.command == "renew":
        renew(told.uv, told.upgrade)
    elif told.command == "pick":
        sys.stdout.write(pick(told.sets, told.without))
    else:
        return audit(told.pip_audit, told.must)
    return 0


if __name__ == "__main__":
    sys.exit(main())
