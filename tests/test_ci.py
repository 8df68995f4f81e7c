"""What `.ci/run` prints of commands that it runs beside each other, also if its limit ends them."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.waiting import until

SCRIPT = (Path(__file__).resolve().parent.parent / ".ci" / "run").read_text()
# Python may be interrupted while it starts, at the lowest priority; then it ends by itself and bash would go on.
SLOW = "echo began; python3 -I -S -c 'import time; time.sleep(60)' && echo went on"
LIMIT_S = 4
ENDED_S = 40.0  # it would go on for a minute


def functions(*names: str) -> str:
    """Those of the script, exported as it does."""
    found = [re.search(rf"^{name}\(\) [{{(]\n.*?^[}})].*?\n", SCRIPT, re.MULTILINE | re.DOTALL) for name in names]
    return "".join(each.group() for each in found if each) + f"export -f {' '.join(names)}\n"


def ran(folder: Path, script: str) -> tuple[str, float]:
    """What it printed, and the seconds that it took. Fails if it leaves a process."""
    mark = f"CI_OF_TEST={folder}"
    environment = {**os.environ, "work": str(folder), "CI_OF_TEST": str(folder)}
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    took_s = time.monotonic() - began
    assert done.stderr == ""
    until(lambda: not marked(mark), 5.0, what=lambda: marked(mark))
    return done.stdout, took_s


def marked(mark: str) -> list[str]:
    """Commands of the processes that have this variable."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (each / "environ").read_bytes().split(b"\0"):
                found.append((each / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.fixture
def part() -> str:
    """Runs a command as a part of the script is run, and says how it ended."""
    assert 'timeout --signal=INT --kill-after=60 "$limit" "$@" </dev/null' in SCRIPT
    return f'run() {{ timeout --signal=INT --kill-after=20 {LIMIT_S} "$@" </dev/null; echo "exit $?"; }}\n'


def test_commands_beside_each_other_are_printed_one_after_the_other_with_their_ends(tmp_path: Path, part: str) -> None:
    script = functions("together") + "good() { echo fine; }; bad() { echo broken >&2; return 3; }; export -f good bad\n"
    said, _ = ran(tmp_path, f"{script}{part}run bash -c 'together good bad \"echo last\"'")
    assert said == "-- good (exit 0)\nfine\n-- bad (exit 3)\nbroken\n-- echo last (exit 0)\nlast\nexit 3\n"


def test_the_limit_ends_them_and_prints_what_each_said_until_then(tmp_path: Path, part: str) -> None:
    script = functions("together") + f"slow() {{ {SLOW}; }}; quick() {{ echo done; }}; export -f slow quick\n"
    said, took_s = ran(tmp_path, f"{script}{part}run bash -c 'together slow quick'")
    assert re.fullmatch(r"-- slow \(exit (\d+)\)\nbegan\n(.*\n)*?-- quick \(exit 0\)\ndone\nexit 124\n", said), said
    assert "-- slow (exit 0)" not in said
    assert "KeyboardInterrupt" in said, "it is interrupted as by Ctrl-C, so that pytest says where it was"
    assert "went on" not in said
    assert took_s < ENDED_S


def test_what_ran_beside_the_parts_is_ended_at_its_limit_and_printed(tmp_path: Path, part: str) -> None:
    script = functions("processor", "together", "quietly", "beside", "ended")
    script += f"slow() {{ {SLOW}; }}; quick() {{ echo done; }}; computing() {{ together slow quick; }}\n"
    script += f"export -f slow quick computing\n{part}beside computing computing &\nrun bash -c 'ended computing'\n"
    said, took_s = ran(tmp_path, script)
    assert re.match(r"-- slow \(exit (\d+)\)\nbegan\n(.*\n)*?-- quick \(exit 0\)\ndone\n", said), said
    assert "-- slow (exit 0)" not in said
    assert "went on" not in said
    assert re.search(r"\d+ s of processor time\nexit 124\n$", said), said
    assert took_s < ENDED_S
