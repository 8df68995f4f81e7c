"""Large logs are cut while their writer goes on."""

from workers.supervisor.announce import waiting_for
from workers.supervisor.logs import rotate, tail


def test_a_large_log_is_kept_once_and_emptied(tmp_path):
    large, small = tmp_path / "a.log", tmp_path / "b.log"
    small.write_text("short\n")
    with large.open("ab", buffering=0) as writer:
        writer.write(b"x" * 500 + b"\n")
        assert rotate(tmp_path, limit=100) == ["a.log"]
        writer.write(b"after\n")
    assert large.read_text() == "after\n"
    assert len((tmp_path / "a.log.1").read_text()) == 501
    assert small.read_text() == "short\n"


def test_tail_gives_the_last_lines(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"line {n}\n" for n in range(2000)))
    assert tail(tmp_path / "a.log", 2) == "line 1998\nline 1999"
    assert tail(tmp_path / "none.log") == ""


def test_what_is_not_ready_is_named():
    health = {"components": {"redis": {"state": "ok"}, "engines": {"state": "down", "detail": "1 of 2 ready"}}}
    assert waiting_for(health) == "engines: 1 of 2 ready"
