"""The end of what an engine printed, readable in a browser."""

from __future__ import annotations

import os

import pytest

from workers.provisioners.logs import log_of, tail_of


@pytest.fixture
def data(tmp_path):
    for name in ("engines", "logs"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_the_log_of_a_started_engine_is_found_by_its_id(data):
    log = data / "logs" / "engine-a-1.log"
    log.write_text("first\nsecond\n")
    os.utime(log, (0, 1_000.5))
    found = log_of("process", "a-1", data)
    assert (found.text, found.cut, found.written_at) == ("first\nsecond\n", False, 1_000.5)


def test_there_is_none_of_other_engines_and_on_other_machines(data, tmp_path):
    (data / "logs" / "engine-a.log").write_text("x")
    assert log_of("process", "b", data) is None
    assert log_of("static", "a", data) is None
    assert log_of("of another version", "a", data) is None
    assert log_of("process", "a", tmp_path / "elsewhere") is None


@pytest.mark.parametrize("id", ["../secret_key", "a/../../secret_key", "..", ""])
def test_no_id_leads_out_of_the_folder(data, id):
    (data / "secret_key").write_text("secret")
    (data / "logs" / "engine-.log").write_text("secret")
    assert log_of("process", id, data) is None


def test_of_a_long_log_only_whole_lines_at_its_end_are_read(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("".join(f"line {number}\n" for number in range(1_000)))
    found = tail_of(path, 100)
    lines = found.text.splitlines()
    assert found.cut
    assert lines[-1] == "line 999"
    assert all(line.startswith("line ") for line in lines)
    assert len(found.text) <= 100


def test_a_line_longer_than_all_that_is_read_is_shown_in_part(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("x" * 1_000)
    assert tail_of(path, 100).text == "x" * 100


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (b"\x1b[1;32mINFO\x1b[0m ready\n", "INFO ready\n"),
        (b"10%\r20%\r100%\n", "100%\n"),
        (b"one\r\ntwo\r\n", "one\ntwo\n"),
        (b"\x1b]0;title\x07text \x00\x08\xc2\x9b31m", "text 31m"),
        (b"tab\there \xff\n", "tab\there \ufffd\n"),
        ("\u00e4\u4f60\n".encode(), "\u00e4\u4f60\n"),
    ],
)
def test_what_a_terminal_would_do_with_it_is_left_out(tmp_path, printed, shown):
    path = tmp_path / "x.log"
    path.write_bytes(printed)
    assert tail_of(path).text == shown
