"""The copy of a model's weights that engines of one host share: who writes it, who may read it, who takes it away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from controller.core.errors import ConfigError
from workers.engine.weights import host_copy
from workers.engine.weights.host_copy import PART, USERS, WHOLE, CopyEntry, HostCopy, NoCopy, digests_of, home, sweep

ENTRIES = [CopyEntry("a", "torch.float32", (2,), 8, "d1"), CopyEntry("b", "torch.bfloat16", (1, 3), 6, "d2")]
BYTES = [b"01234567", b"abcdef"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


def written(copy: HostCopy, pieces: list[bytes] = BYTES) -> bool:
    return copy.write(copy.key(), ENTRIES, map(memoryview, pieces))


def files(base: Path) -> set[str]:
    return {path.name for path in home(base).glob("*/*")}


def test_one_writes_and_every_engine_of_the_checkpoint_reads(base, checkpoint):
    first, second = HostCopy(base, checkpoint, "float32"), HostCopy(base, checkpoint, "float32")
    assert (first.whole(), second.whole()) == (None, None)
    assert written(first)
    assert not written(second), "it is there"
    folder = second.whole()
    assert folder is not None
    assert folder == first.whole()
    raw = (folder / WHOLE).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + size])
    assert (size % 8, raw[8 + size :]) == (0, b"".join(BYTES))
    assert digests_of(table["__metadata__"]) == {"a": "d1", "b": "d2"}
    assert table["b"] == {"dtype": "BF16", "shape": [1, 3], "data_offsets": [8, 14]}
    assert HostCopy(base, checkpoint, "bfloat16").whole() is None, "of another type it is another copy"


def test_no_one_else_may_read_or_write_it(base, checkpoint):
    copy = HostCopy(base, checkpoint, "float32")
    written(copy)
    folder = copy.whole()
    assert folder is not None
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / WHOLE, folder / USERS)}
    assert set(modes.values()) == {0o700, 0o600}, modes
    folder.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="only this user owns") as refused:
        HostCopy(base, checkpoint, "float32")
    assert refused.value.field == "host_copy"


def test_a_folder_that_leads_elsewhere_is_refused(base, tmp_path, checkpoint):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (base / f"slackline-weights-{os.geteuid()}").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="only this user owns"):
        HostCopy(base, checkpoint, "float32")


def test_half_a_copy_is_no_copy(base, checkpoint):
    first, second = HostCopy(base, checkpoint, "float32"), HostCopy(base, checkpoint, "float32")
    begun, go_on = threading.Event(), threading.Event()

    def slowly():
        yield memoryview(BYTES[0])
        begun.set()
        go_on.wait(30)
        yield memoryview(BYTES[1])

    writing = threading.Thread(target=lambda: first.write(first.key(), ENTRIES, slowly()))
    writing.start()
    assert begun.wait(30)
    assert second.whole() is None
    assert not written(second), "somebody writes it"
    go_on.set()
    writing.join()
    assert second.whole() is not None
    assert files(base) == {WHOLE, USERS}


def test_what_breaks_off_leaves_nothing_and_may_be_written_again(base, checkpoint):
    copy = HostCopy(base, checkpoint, "float32")

    def breaks():
        yield memoryview(BYTES[0])
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError):
        copy.write(copy.key(), ENTRIES, breaks())
    assert (copy.whole(), files(base)) == (None, {USERS})
    assert written(copy)


@pytest.mark.parametrize("what", ["host", "file system"])
def test_without_room_none_is_written(base, checkpoint, monkeypatch, what):
    copy = HostCopy(base, checkpoint, "float32")
    if what == "host":
        monkeypatch.setattr(host_copy, "available", lambda: 27)
    else:
        real = os.statvfs(base)
        full = os.statvfs_result((*real[:4], 0, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(NoCopy, match="needs 2 times as much free"):
        written(copy)
    assert (copy.whole(), files(base)) == (None, {USERS})


def test_a_checkpoint_that_was_replaced_has_no_copy(base, checkpoint):
    copy, other = HostCopy(base, checkpoint, "float32"), HostCopy(base, checkpoint, "float32")
    read = copy.key()
    written(copy)
    weights = checkpoint / "model.safetensors"
    seen = weights.stat()
    weights.write_bytes(b"WEIGHTS")  # of the same size, and as it says of the same age
    os.utime(weights, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert copy.whole() is None
    with pytest.raises(NoCopy, match="changed after it was read"):
        copy.write(read, ENTRIES, map(memoryview, BYTES))
    assert other.whole() is None
    assert files(base) == {USERS}, "nobody needs the old one"


def test_the_last_user_takes_it_away(base, checkpoint):
    first, second = HostCopy(base, checkpoint, "float32"), HostCopy(base, checkpoint, "float32")
    written(first)
    first.close()
    assert second.whole() is not None
    assert sweep(base) == []
    second.close()
    assert list(home(base).iterdir()) == []


USER = """
import sys, time
from pathlib import Path
from workers.engine.weights.host_copy import CopyEntry, HostCopy

copy = HostCopy(Path(sys.argv[1]), Path(sys.argv[2]), "float32")
entries = [CopyEntry("a", "torch.float32", (2,), 8, "d1")]

def tensors():
    if "half" in sys.argv:
        print("half", flush=True)
        time.sleep(600)
    yield memoryview(b"01234567")

copy.write(copy.key(), entries, tensors())
print("whole", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how_far", ["half", "whole"])
def test_what_a_killed_engine_leaves_is_taken_away_by_who_looks_next(base, checkpoint, how_far):
    command = [sys.executable, "-c", USER, str(base), str(checkpoint), how_far]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline().strip() == how_far
            left = {"half": {PART, USERS}, "whole": {WHOLE, USERS}}[how_far]
            assert (files(base), sweep(base)) == (left, []), "it lives"
        finally:
            engine.send_signal(signal.SIGKILL)
    assert files(base) == left
    assert len(sweep(base)) == 1
    assert list(home(base).iterdir()) == []


def test_a_copy_that_was_found_damaged_is_written_again(base, checkpoint):
    copy = HostCopy(base, checkpoint, "float32")
    written(copy)
    copy.discard()
    assert copy.whole() is None
    assert written(copy)


def test_there_is_nothing_to_sweep_where_nothing_is(tmp_path):
    assert sweep(tmp_path / "nowhere") == []


def told(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        ({}, 8192),
        ({"memory.max": "max", "memory.current": "9", "memory.stat": "inactive_file 0"}, 8192),
        ({"memory.max": "5000", "memory.current": "4000", "memory.stat": "anon 1\ninactive_file 500"}, 1500),
        (
            {
                "memory/memory.limit_in_bytes": "700",
                "memory/memory.usage_in_bytes": "600",
                "memory/memory.stat": "total_inactive_file 50",
            },
            150,
        ),
        ({"memory.max": "90000", "memory.current": "0", "memory.stat": "inactive_file 0"}, 8192),
    ],
)
def test_memory_is_what_the_host_and_the_container_have_left(tmp_path, groups, left):
    proc = told(tmp_path / "proc", {"meminfo": "MemTotal: 99 kB\nMemAvailable:       8 kB\n"})
    assert host_copy.available(proc, told(tmp_path / "groups", groups)) == left


def test_a_host_that_does_not_tell_its_memory_is_an_error(tmp_path):
    with pytest.raises(OSError, match="does not say"):
        host_copy.available(told(tmp_path, {"meminfo": "MemTotal: 99 kB\n"}), tmp_path)
