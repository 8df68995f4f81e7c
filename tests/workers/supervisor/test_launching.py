"""Engines from launch templates: real processes that do what servers do, and what servers must not do."""

import os
import sys
import textwrap
import time
import urllib.request

import pytest

from tests.waiting import until
from workers.http.fleet_proof import made_key
from workers.provisioners import ProcessProvisioner
from workers.supervisor import child, engine_processes
from workers.supervisor.child import Child, Spec, strays
from workers.supervisor.engine_processes import MARK, EngineFolder, StartSteps
from workers.supervisor.launching import launch_from, secret
from workers.supervisor.log_filter import without
from workers.supervisor.ports import free_port

SERVER = textwrap.dedent(
    """
    import http.server, os, subprocess, sys, time
    port, what = int(sys.argv[1]), sys.argv[2]
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/ready" else 404)
            self.end_headers()
        def log_message(self, *told):
            pass
    print("environment:", sorted(os.environ), flush=True)
    print("Loading weights took 0.1 seconds", flush=True)
    if what == "secret":
        sys.stdout.write("token is " + os.environ["HF_TOKEN"][:5]); sys.stdout.flush(); time.sleep(0.1)
        print(os.environ["HF_TOKEN"][5:], "and the key", os.environ["THE_KEY"], flush=True)
    if what == "forks":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    if what == "silent":
        time.sleep(300)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers)
    print("Graph capturing finished in 1 secs\\nApplication startup complete.", flush=True)
    if what == "dies":
        import threading
        threading.Timer(1.5, lambda: os._exit(7)).start()
    server.serve_forever()
    """
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "engine-secrets").mkdir()
    (tmp_path / "engine-secrets" / "hf").write_text("hf_verySecret\n")
    env = {**os.environ, "FLEET_TOKEN": "the fleet's", "DATA_DIR": str(tmp_path), "DATABASE_URL": "postgres://x:y@z/d"}
    engines = EngineFolder(tmp_path / "engines", tmp_path, env)
    yield engines
    engines.stop_all(lambda: True)


def order(what, **changed):
    return {
        "command": ["${python}", "-c", SERVER.replace("$", "$$"), "${port}", what],
        "environment": {"PORT_TOO": "${port}"},
        "secrets": {},
        "health_path": "/ready",
        "start_limit_s": 30.0,
        "key_variable": "",
        "backend": "vllm",
        **changed,
    }


def start(folder, id, what, **changed):
    ProcessProvisioner(folder.folder).start(id, {"id": id, "launch": order(what, **changed)})


def seen(folder, id):
    return {each.id: each for each in ProcessProvisioner(folder.folder).observe()}.get(id)


def settle(folder, condition):
    """Let the supervisor go on until `condition` holds."""
    until(lambda: condition() or folder.sync(), what=ProcessProvisioner(folder.folder).observe)


def state(folder, id):
    found = seen(folder, id)
    return found.state if found else None


def test_a_template_becomes_a_server_whose_start_is_followed(folder):
    began = time.time()
    start(folder, "v1", "serves")
    settle(folder, lambda: state(folder, "v1") == "ready")
    found = seen(folder, "v1")
    with urllib.request.urlopen(f"{found.url}/ready", timeout=5) as answer:
        assert answer.status == 200
    assert list(found.steps) == ["process", "weights", "graphs", "listening", "ready"]
    assert sorted(found.steps.values()) == list(found.steps.values())
    assert began - 1 < found.steps["process"] <= time.time()
    told = (folder.logs / "engine-v1.log").read_text()
    assert "'PORT_TOO'" in told
    for private in ("DATABASE_URL", "FLEET_TOKEN", "SECRET_KEY"):
        assert f"'{private}'" not in told, "what is Slackline's own is no engine's business"
    ProcessProvisioner(folder.folder).stop("v1", 5.0)
    settle(folder, lambda: state(folder, "v1") is None)


def test_what_an_engine_prints_at_once_is_followed_too(tmp_path):
    """On a busy machine it may print before the supervisor goes on."""
    log = tmp_path / "engine.log"
    log.write_text("Application startup complete.\n")
    said = "print('Loading weights took 0.1 seconds', flush=True)"
    engine = Child(Spec("v1", (sys.executable, "-c", said), dict(os.environ), log))
    until(lambda: "weights" in log.read_text())
    steps = StartSteps("vllm", engine)
    steps.look()
    assert list(steps.reached) == ["process", "weights"], "the line before is of an earlier process"
    until(engine.stopped)


def test_a_clock_that_is_set_during_a_start_makes_it_no_longer(folder, monkeypatch):
    began, wall = time.time(), time.time
    start(folder, "v1", "serves")
    settle(folder, lambda: state(folder, "v1") == "starting")
    monkeypatch.setattr("workers.supervisor.engine_processes.time.time", lambda: wall() + 3600.0)
    settle(folder, lambda: state(folder, "v1") == "ready")
    monkeypatch.undo()
    steps = seen(folder, "v1").steps
    assert began <= steps["process"] <= steps["ready"] <= time.time()


def test_a_program_that_does_not_exist_is_said_by_name(folder, tmp_path):
    start(folder, "v1", "", command=["no-such-program", "${port}"])
    folder.sync()
    found = seen(folder, "v1")
    assert found.state == "exited"
    assert found.error == "the program no-such-program was not found in PATH or ENGINE_PATH"
    text = tmp_path / "text"
    text.write_text("no program")
    for id, mode, said in (("v2", 0o644, f"the program {text} was not found"), ("v3", 0o755, "Exec format error")):
        text.chmod(mode)
        start(folder, id, "", command=[str(text), "${port}"])
        folder.sync()
        assert said in seen(folder, id).error


def test_one_that_never_listens_stays_starting_and_ends_when_it_is_told_to(folder):
    start(folder, "v1", "silent")
    settle(folder, lambda: seen(folder, "v1").steps and "weights" in seen(folder, "v1").steps)
    for _ in range(5):
        folder.sync()
    assert state(folder, "v1") == "starting"
    ProcessProvisioner(folder.folder).stop("v1", 0.0)
    settle(folder, lambda: state(folder, "v1") is None)


def test_one_that_listens_and_dies_is_not_started_again_under_its_id(folder):
    start(folder, "v1", "dies")
    settle(folder, lambda: state(folder, "v1") == "ready")
    settle(folder, lambda: state(folder, "v1") == "exited")
    pid = seen(folder, "v1").pid
    for _ in range(10):
        folder.sync()
    found = seen(folder, "v1")
    assert (found.state, found.exit_code, found.pid) == ("exited", 7, pid)


def test_secrets_are_in_the_environment_and_in_no_file(folder, tmp_path):
    start(folder, "v1", "secret", secrets={"HF_TOKEN": "hf"}, key_variable="THE_KEY")
    settle(folder, lambda: state(folder, "v1") == "ready")
    ProcessProvisioner(folder.folder).stop("v1", 5.0)
    settle(folder, lambda: state(folder, "v1") is None)
    told = (folder.logs / "engine-v1.log").read_text()
    assert "token is [secret] and the key [secret]" in told
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.parent.name != "engine-secrets":
            text = path.read_text(errors="replace")
            assert "hf_verySecret" not in text, path
            assert made_key("the fleet's", "v1") not in text, path


def test_no_part_of_a_secret_of_several_lines_is_in_the_log(folder, tmp_path):
    """As in a private key: an engine prints it line by line, or escaped in an error."""
    first, second, whole = "MIIEvQIBADANBgkqhkiG", "9w0BAQEFAASCBKcwggSj", '{"key": "C:\\made"}'
    (tmp_path / "engine-secrets" / "pem").write_text(f"{first}\n{second}\n{whole}\n")
    prints = (
        "import os, json, time\n"
        "for line in os.environ['PEM'].splitlines():\n"
        "    print(line, flush=True); time.sleep(0.1)\n"
        "print('as JSON', json.dumps(os.environ['PEM']), 'as Python', [os.environ['PEM']], '${port} end', flush=True)"
    )
    start(folder, "v1", "", command=["${python}", "-c", prints], secrets={"PEM": "pem"})
    settle(folder, lambda: state(folder, "v1") == "exited")
    told = until(lambda: (text := (folder.logs / "engine-v1.log").read_text()).endswith(" end\n") and text)
    assert "as JSON" in told
    for part in (first, second, "made"):
        assert part not in told


def test_the_fleets_token_is_in_no_log_of_a_reference_engine(folder):
    prints = "import os; print('token:', os.environ['FLEET_TOKEN'], '${port}', flush=True)"
    start(folder, "v1", "", command=["${python}", "-c", prints], backend="reference")
    settle(folder, lambda: state(folder, "v1") == "exited")
    told = until((folder.logs / "engine-v1.log").read_text)
    assert told.startswith("token: [secret] ")


def test_the_last_words_of_an_engine_with_secrets_are_its_error(folder, tmp_path, monkeypatch):
    """Its output reaches the log through a filter, which may be slower than the look at its end."""
    slow = tmp_path / "slow_filter.py"
    slow.write_text(f"import time; time.sleep(0.3); exec(compile(open({str(child.FILTER)!r}).read(), 'f', 'exec'))")
    monkeypatch.setattr(child, "FILTER", slow)
    says = "print('no such model, ${port}', flush=True); raise SystemExit(3)"
    start(folder, "v1", "", command=["${python}", "-c", says], secrets={"HF_TOKEN": "hf"})
    settle(folder, lambda: state(folder, "v1") == "exited")
    found = seen(folder, "v1")
    assert (found.exit_code, found.error[:13]) == (3, "no such model")


def test_a_secret_that_is_missing_is_named(folder):
    start(folder, "v1", "secret", secrets={"HF_TOKEN": "other"})
    folder.sync()
    assert (
        seen(folder, "v1").error == "the secret other cannot be read in ENGINE_SECRETS_DIR: No such file or directory"
    )


@pytest.mark.parametrize("name", ["../hf", "", "a/b", ".hf"])
def test_a_secret_is_a_file_of_the_folder(folder, name):
    with pytest.raises(Exception, match="no name of a secret"):
        secret(folder.env, name)


def test_what_an_engine_leaves_behind_ends_with_it(folder):
    start(folder, "v1", "forks")
    settle(folder, lambda: state(folder, "v1") == "ready")
    mark = f"{MARK}={folder.folder}/v1"
    assert len(strays(mark)) == 3
    ProcessProvisioner(folder.folder).stop("v1", 5.0)
    settle(folder, lambda: state(folder, "v1") is None)
    settle(folder, lambda: strays(mark) == [])


def test_two_that_start_together_get_ports_of_their_own(folder):
    for number in range(4):
        start(folder, f"v{number}", "serves")
    settle(folder, lambda: all(state(folder, f"v{number}") == "ready" for number in range(4)))
    assert len({seen(folder, f"v{number}").url for number in range(4)}) == 4


def test_a_port_that_one_has_and_does_not_listen_on_yet_is_not_given_to_another(folder, monkeypatch):
    """Nothing but its row says that it is taken: for minutes, while a model is loaded."""
    first, second = free_port(), free_port()
    offered = iter([first, first, first, second])
    monkeypatch.setattr(engine_processes, "free_port", lambda: next(offered))
    for name in ("a", "b"):
        start(folder, name, "silent")
    folder.sync()
    assert sorted(engine.port for engine in folder.engines.values()) == sorted({first, second})


def test_devices_are_those_that_it_holds(folder):
    made = launch_from(order("x"), 5, {"PATH": "/bin"}, {"CUDA_VISIBLE_DEVICES": "2"}, "")
    assert made.env["CUDA_VISIBLE_DEVICES"] == "2"
    assert made.argv[0] == sys.executable
    assert made.argv[-2:] == ("5", "x")


@pytest.mark.parametrize("missing", ["command", "environment", "health_path"])
def test_an_incomplete_order_is_refused(folder, missing):
    made = order("x")
    del made[missing]
    ProcessProvisioner(folder.folder).start("v1", {"id": "v1", "launch": made})
    folder.sync()
    assert "the launch is incomplete" in seen(folder, "v1").error


def test_a_value_across_two_parts_of_a_log_is_found():
    parts = [b"a sec", b"ret b\nsecr", b"et", b" tail without end"]
    assert b"".join(without(parts, [b"secret"])) == b"a [secret] b\n[secret] tail without end"


def test_a_log_is_passed_on_line_by_line():
    assert list(without([b"one\n", b"two\nthr"], [b"secret"])) == [b"one\n", b"two\n", b"thr"]
