"""A copy of a model's weights in this host's memory, shared by all engines that use the same folder for it.

In the folder of `--host-copy` (such as /dev/shm) each user has a private folder, and in it one folder for each
checkpoint. That contains a valid `model.safetensors`, with every tensor's digest in its metadata. The first engine that
reads the checkpoint from the disk writes the copy to a temporary file and renames it when it is complete.

Every engine of that checkpoint holds a lock on the file `users` while it lives; the kernel releases it however the
engine ends. The last engine removes the copy, and any engine or supervisor removes copies that no engine holds. This
module does not import torch.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from controller.core.errors import ConfigError, SlacklineError
from workers.engine.weights.checkpoint_identity import marks_of

WHOLE, PART, USERS = "model.safetensors", "part", "users"
ROOM = 2  # this many times its size must be free before a copy is written, to leave memory for others
FORMAT = 2  # 2: digests name their algorithm
_KINDS = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}


class NoCopy(SlacklineError):
    """No copy can be written now; the message has the reason."""


class CopyEntry(NamedTuple):
    """A tensor of a copy. `dtype`: torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    digest: str


class HostCopy:
    """The copy of one checkpoint, as one engine uses it. Thread-safe. `base`: the configured folder, preferably in
    memory.

    Raises ConfigError naming `host_copy` if the folder cannot be used, or if other users could write there.
    """

    def __init__(self, base: Path, checkpoint: Path, dtype: str) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self._home = home(base)
        self._users: IO[bytes] | None = None  # locked while this engine lives
        self._joined = ""
        self._joining = threading.RLock()
        sweep(base)
        self.at_start = self.key()
        self._join(self.at_start)
        atexit.register(self.close)

    def key(self) -> str:
        """A key of the checkpoint on the disk, which changes if any of its files is written or replaced."""
        said = "\n".join((f"{FORMAT} {self._dtype}", *marks_of(self._checkpoint)))
        return hashlib.sha256(said.encode()).hexdigest()[:32]

    def whole(self) -> Path | None:
        """The folder of a complete copy of the current checkpoint; None if there is none."""
        folder = self._join(self.key())
        return folder if (folder / WHOLE).is_file() else None

    def discard(self) -> None:
        """Remove a damaged copy. Engines that have it open keep their view of it."""
        (self._join(self.key()) / WHOLE).unlink(missing_ok=True)

    def write(self, key: str, entries: Sequence[CopyEntry], tensors: Iterable[memoryview]) -> bool:
        """Write a copy of what was read while the checkpoint had this key. False: it exists already, or another engine
        writes it.

        Raises NoCopy if the checkpoint has changed since, or if there is not enough room.
        """
        if key != self.key():
            raise NoCopy("the checkpoint was changed after it was read")
        folder = self._join(key)
        if (folder / WHOLE).exists():
            return False
        with _locked(folder / PART, fcntl.LOCK_EX | fcntl.LOCK_NB) as part:
            if part is None or (folder / WHOLE).exists():
                return False
            try:
                _check_room(folder, sum(entry.nbytes for entry in entries))
                part.truncate(0)
                part.write(_header(entries))
                for tensor in tensors:
                    part.write(tensor)
                part.flush()
                os.replace(folder / PART, folder / WHOLE)
            except OSError as error:
                raise NoCopy(f"{folder}: {error}") from error
            finally:
                (folder / PART).unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Stop using the copy; the last user removes it."""
        with self._joining:
            if self._users is not None:
                self._users.close()
                self._users, left = None, self._home / self._joined
                self._joined = ""
                _remove_unused(left)

    def _join(self, key: str) -> Path:
        """Become a user of the copy with this key, and stop using an earlier one."""
        folder = self._home / key
        with self._joining:
            if key == self._joined:
                return folder
            self.close()
            while True:
                folder.mkdir(mode=0o700, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # removed in between
                    if (users := _lock(folder / USERS, fcntl.LOCK_SH)) is not None:
                        self._users, self._joined = users, key
                        return folder


def home(base: Path) -> Path:
    """This user's folder for copies below `base`. Raises ConfigError if other users have access to it."""
    path = base / f"slackline-weights-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"no copies of weights can be kept below {base}: {error}", "host_copy") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} must be a folder that only this user owns and can enter (mode 0700)", "host_copy")
    return path


def sweep(base: Path) -> list[str]:
    """Remove this user's copies that no running engine holds; returns their keys."""
    path = base / f"slackline-weights-{os.geteuid()}"
    with contextlib.suppress(OSError):
        return [folder.name for folder in path.iterdir() if _remove_unused(folder)]
    return []


def digests_of(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The digests by tensor, as `write` stored them. Raises ValueError."""
    found = json.loads((metadata or {}).get("digests", "null"))
    if not isinstance(found, dict):
        raise ValueError("the copy has no digests")
    return {str(name): str(digest) for name, digest in found.items()}


def _remove_unused(folder: Path) -> bool:
    with contextlib.suppress(OSError), _locked(folder / USERS, fcntl.LOCK_EX | fcntl.LOCK_NB) as users:
        if users is None:
            return False
        for name in (WHOLE, PART, USERS):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
        return True
    return False


def _lock(path: Path, how: int) -> IO[bytes] | None:
    """The locked file; None if another process holds the lock, or if the file was removed meanwhile. Raises OSError."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+b")
    try:
        fcntl.flock(file, how)
        if os.path.samestat(os.fstat(file.fileno()), path.lstat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[IO[bytes] | None]:
    file = _lock(path, how)
    try:
        yield file
    finally:
        if file is not None:
            file.close()


def _header(entries: Sequence[CopyEntry]) -> bytes:
    """The header of the safetensors format: its length, then JSON padded to 8 bytes. Raises NoCopy."""
    table: dict[str, object] = {"__metadata__": {"digests": json.dumps({each.name: each.digest for each in entries})}}
    begin = 0
    for each in entries:
        if each.dtype not in _KINDS:
            raise NoCopy(f"tensor {each.name} is {each.dtype}")
        where = [begin, begin + each.nbytes]
        table[each.name] = {"dtype": _KINDS[each.dtype], "shape": list(each.shape), "data_offsets": where}
        begin += each.nbytes
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_room(folder: Path, nbytes: int) -> None:
    free = room(folder)
    if free < ROOM * nbytes:
        raise NoCopy(
            f"a copy of {nbytes / 1e9:.2f} GB needs {ROOM} times as much free space in {folder}: {free / 1e9:.2f} GB"
        )


def room(folder: Path) -> int:
    """Bytes that are free both in the file system and in the host's memory, since the former usually uses the latter.
    Raises OSError."""
    at = os.statvfs(folder)
    return min(at.f_bavail * at.f_frsize, available())


def available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that are available without swapping: of the host, or of this container if that is less. Raises
    OSError if the host does not tell."""
    lines = (proc / "meminfo").read_text().splitlines()
    told = next((line for line in lines if line.startswith("MemAvailable:")), None)
    if told is None:
        raise OSError(f"{proc}/meminfo does not say how much memory is available")
    return min([int(told.split()[1]) * 1024, *_left_in_groups(groups)])


def _left_in_groups(groups: Path) -> list[int]:
    """Bytes left of the limits of control groups, of version 2 and 1, as a container sees its own. Files that are read
    and no longer in use make room."""
    found = []
    for folder, limit, used in (
        (groups, "memory.max", "memory.current"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            spare = int(figures.get("total_inactive_file", figures.get("inactive_file", 0)))
            found.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + spare)
    return found
