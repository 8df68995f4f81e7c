"""The Ray provisioner against a fake of the Jobs REST that runs real launchers and engines."""

import base64
import math
import secrets
import signal
import sys
import threading
import time
import zlib
from pathlib import Path

import psutil
import pytest
import requests

from controller.core.errors import ConfigError
from tests.waiting import until
from tests.workers.ray import fake_cluster
from tests.workers.ray.fake_cluster import FakeCluster
from workers.http.fleet_proof import made_key
from workers.provisioners.ray import LOST_S, ClusterMemory, KnownJob, RayProvisioner, _reported
from workers.ray import launches
from workers.ray.clusters import RayCluster
from workers.ray.control import LauncherClient
from workers.ray.jobs import ClusterUnreachable

ENGINE = str(Path(__file__).parents[1] / "ray" / "engine.py")
TOKEN = "fleet-token-of-the-test"


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(launches, "ORPHAN_S", 1.0)
    made = FakeCluster()
    yield made
    made.close()
    assert not made.folder.exists()
    left = [each for each in psutil.process_iter(["cmdline"]) if ENGINE in (each.info["cmdline"] or [])]
    until(lambda: not any(each.is_running() and each.status() != "zombie" for each in left), 15, what="engines left")


class Fleet:
    """One Slackline: its rows, and looks at the cluster as its worker makes them."""

    def __init__(self, fake, token=""):
        token = token or secrets.token_hex(8)  # of an earlier test, an engine of the same id may be ending
        self.fake, self.token, self.rows, self.memory = fake, token, {}, ClusterMemory()

    def ray(self):
        cluster = RayCluster("default", self.fake.url, self.fake.token)
        return RayProvisioner(cluster, self.token, self.rows, self.memory)

    def start(self, id, *how, environment=None, secret_names=None, runtime_env=None, **spec):
        self.rows.setdefault(id, KnownJob(made="1.0", spec=spec))
        launch = {
            "command": [sys.executable, ENGINE, "${port}", *how], "environment": environment or {}, "backend": "vllm",
            "secrets": secret_names or {}, "health_path": "/health", "key_variable": "KEY",
        }  # fmt: skip
        set_up = {"runtime_env": runtime_env} if runtime_env else {}
        self.ray().start(id, {"launch": launch, "placement": spec, **set_up})

    def look(self, id):
        """As the reconciler: what was seen goes to the row."""
        found = next((each for each in self.ray().observe() if each.id == id), None)
        if found is not None and id in self.rows:
            row = self.rows[id]
            state = {"exited": "failed", "stopping": row.state}.get(found.state, found.state)
            self.change(id, state=state, url=found.url or row.url)
        return found

    def change(self, id, **fields):
        row = self.rows[id]
        known = {name: getattr(row, name) for name in ("url", "made", "state", "wanted", "lost_for_s", "spec")}
        self.rows[id] = KnownJob(**{**known, **fields})

    def becomes(self, id, state, within_s=10.0):
        seen = []

        def met():
            try:
                seen.append(self.look(id))
            except ClusterUnreachable as error:  # on a busy machine an answer may take longer than it is waited for
                seen.append(error)
                return None
            if state is None:
                return seen[-1] is None
            return seen[-1] if seen[-1] is not None and seen[-1].state == state else None

        return until(met, within_s, what=lambda: repr(seen[-1]))


@pytest.fixture
def fleet(fake):
    return Fleet(fake)


def ended(pid):
    """A process that nobody waits for stays a zombie."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def answers(url, key=""):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return requests.get(f"{url}/health", headers=headers, timeout=10).status_code  # of a busy machine
    except requests.ConnectionError:
        return None


def test_an_engine_from_start_to_stop(fake, fleet):
    fake.agents = False
    fleet.start("e1", resources={"fast_device": 1}, labels={"zone": "a"})
    seen = fleet.becomes("e1", "ready")
    assert answers(seen.url, made_key(fleet.token, "e1")) == 200
    assert answers(seen.url) == 401, "it has a key of its own"
    assert {"process", "ready"} <= set(seen.steps)
    assert "listening on" in fleet.ray().log("e1").text
    [body] = fake.submitted
    assert body["entrypoint_resources"] == {"fast_device": 1}
    assert body["entrypoint_label_selector"] == {"zone": "a"}
    assert fleet.token not in str(body)
    assert made_key(fleet.token, "e1") not in str(body)
    fleet.change("e1", wanted=False)
    fleet.ray().stop("e1", 5.0)
    fleet.ray().stop("e1", 5.0)
    fleet.becomes("e1", None)
    assert answers(seen.url) is None
    assert fake._state("e1")["status"] == "SUCCEEDED"


def test_a_runtime_environment_goes_to_the_cluster_as_it_is(fake, fleet):
    set_up = {"pip": ["vllm==0.32.0"], "env_vars": {"A": "${B}"}}
    fleet.start("e1", runtime_env=set_up)
    fleet.start("e2")
    assert [body.get("runtime_env") for body in fake.submitted] == [set_up, None]


def test_a_start_that_is_repeated_starts_one(fake, fleet):
    """As after a worker that was killed between submit and record."""
    fleet.start("e1")
    fleet.start("e1")
    assert len(fake.jobs) == 1
    fleet.becomes("e1", "ready")
    fleet.memory = ClusterMemory()  # another worker, which knows the row only
    assert fleet.look("e1").state == "ready"


def test_an_instance_that_was_made_after_the_rows_were_read_starts_at_the_next_look(fake, fleet):
    """Its job would not be known as that of its row, and hold its resources until its launcher gives up."""
    earlier = fleet.ray()
    earlier.observe()
    earlier.rows = {}
    launch = {"command": [sys.executable, ENGINE, "${port}"], "environment": {}, "secrets": {}, "key_variable": ""}
    earlier.start("e1", {"launch": {**launch, "health_path": "/health"}})
    assert fake.submitted == []
    fleet.start("e1")
    assert fleet.becomes("e1", "ready")


def test_a_job_that_the_cluster_refuses_has_failed_and_is_not_submitted_again(fake, fleet):
    """So it is replaced after growing pauses, and its template waits for a person in the end, as after any failure."""
    fake.refuses = "TypeError: runtime_env['pip'] must be of type list"
    for _ in range(2):
        with pytest.raises(ConfigError, match="refused the job: TypeError"):
            fleet.start("e1")
        seen = fleet.look("e1")
        assert (seen.state, seen.error) == ("exited", f"{fake.url} refused the job: {fake.refuses}")
    assert len(fake.submitted) == 1
    fleet.change("e1", wanted=False)
    assert fleet.look("e1") is None
    fake.refuses = ""
    fleet.start("e2")
    assert fleet.becomes("e2", "ready")
    del fleet.rows["e1"]
    fleet.look("e2")
    assert fleet.memory.refused == {}


def test_a_job_of_somebody_else_is_not_touched(fake, fleet):
    fake.jobs["e1"] = {"submission_id": "e1", "status": "RUNNING", "metadata": None, "devices": 0}
    with pytest.raises(ConfigError, match="not of this Slackline"):
        fleet.start("e1")
    assert fleet.ray().observe() == []
    fleet.ray().stop("e1", 0.0)
    assert fleet.ray().log("e1") is None
    assert fake.jobs["e1"]["status"] == "RUNNING"


def test_two_slacklines_see_their_own(fake, fleet):
    other = Fleet(fake, "another-fleet-token")
    fleet.start("a")
    other.start("b")
    fleet.becomes("a", "ready")
    other.becomes("b", "ready")
    assert [each.id for each in fleet.ray().observe()] == ["a"]
    fleet.ray().stop("b", 0.0)
    assert other.look("b").state == "ready"


def test_want_of_resources_is_told_and_healed(fake, fleet):
    fleet.start("e1", resources={"fast_device": 5})
    told = fleet.becomes("e1", "pending").error
    assert told == "waits for a node with 5 fast_device: no node has more than 4 fast_device"
    fake.adds(4.0)
    fleet.becomes("e1", "ready")
    fleet.start("e2", resources={"fast_device": 4})
    assert (
        "waits for 4 fast_device on one node: the most that is free on one is 3 fast_device" in fleet.look("e2").error
    )


def test_labels_that_no_node_has_are_told(fake, fleet):
    fake.free = 0.0
    fleet.start("e1", resources={"fast_device": 1}, labels={"zone": "b"})
    assert fleet.look("e1").error == "waits for a node with the labels zone=b: the cluster has none"


def test_hosts_of_the_cluster(fleet):
    ray = fleet.ray()
    ray.observe()
    [host] = ray.hosts()
    assert (host.name, host.state, host.labels) == ("127.0.0.1", "alive", {"zone": "a"})
    assert host.resources == {"fast_device": (4.0, 4.0), "memory": (1e9, 1e9)}


def test_an_engine_that_dies_tells_why(fleet):
    fleet.start("e1", "dies")
    seen = fleet.becomes("e1", "exited")
    assert (seen.exit_code, seen.error) == (3, "no such model")


def test_an_engine_that_is_killed_tells_the_signal(fake, fleet):
    fleet.start("e1")
    pid = fleet.becomes("e1", "ready").pid
    psutil.Process(pid).kill()
    seen = fleet.becomes("e1", "exited")
    assert seen.exit_code == -signal.SIGKILL
    assert "out of memory" in seen.error


def test_a_program_that_is_not_there(fake, fleet):
    fleet.rows["e1"] = KnownJob(made="1.0")
    launch = {"command": ["no-such-engine", "${port}"], "environment": {}, "secrets": {}, "health_path": "/"}
    fleet.ray().start("e1", {"launch": {**launch, "key_variable": ""}})
    seen = fleet.becomes("e1", "exited")
    assert seen.error == "the program no-such-engine was not found on this node"


def test_secrets_are_files_of_the_node_and_in_no_log(fake, fleet, tmp_path):
    (tmp_path / "hf").write_text("hf-secret-value")
    fake.environment = {"ENGINE_SECRETS_DIR": str(tmp_path)}
    fleet.start("e1", "leaks", secret_names={"TOKEN": "hf"})
    fleet.becomes("e1", "ready")
    assert "the secret is [secret] and the key [secret]" in fleet.ray().log("e1").text
    fleet.start("e2", "leaks", secret_names={"TOKEN": "other"})
    assert "the secret other cannot be read on this node" in fleet.becomes("e2", "exited").error


def test_what_an_engine_forked_ends_with_it(fleet):
    fleet.start("e1", "forks")
    fleet.becomes("e1", "ready")
    child = until(lambda: [line for line in fleet.ray().log("e1").text.splitlines() if line.startswith("child")])
    fleet.change("e1", wanted=False)
    fleet.ray().stop("e1", 1.0)
    fleet.becomes("e1", None)
    assert until(lambda: ended(int(child[0].split()[1])), 5)


def test_a_lost_job_is_drained_and_then_over(fake, fleet, monkeypatch):
    monkeypatch.setattr(launches, "ORPHAN_S", 20.0)
    monkeypatch.setattr("workers.provisioners.ray.DRAIN_S", 1.0)
    fleet.start("e1")
    url = fleet.becomes("e1", "ready").url
    fake.lose_supervisor("e1")
    seen = fleet.look("e1")
    assert (seen.state, seen.error) == ("lost", "its node was lost; its engine still runs and is drained")
    assert answers(url, made_key(fleet.token, "e1")) == 200, "what streams may end"
    over = fleet.becomes("e1", "exited")
    assert over.error == "its node was lost"
    assert answers(url) is None


def test_an_orphan_is_known_before_ray_knows_it(fake, fleet, monkeypatch):
    monkeypatch.setattr("workers.provisioners.ray.DRAIN_S", 0.2)
    monkeypatch.setattr(launches, "ORPHAN_S", 20.0)
    fleet.start("e1")
    fleet.becomes("e1", "ready")
    fake.lose_supervisor("e1")
    fake.jobs["e1"]["status"] = "RUNNING"  # what the cluster still says
    fake.processes.pop("e1")
    assert "its engine still runs and is drained" in fleet.becomes("e1", "lost").error
    over = fleet.becomes("e1", "exited")
    assert (over.exit_code, over.error) == (None, "its node or its job was lost")


def test_an_orphan_that_nobody_reaches_ends_by_itself(fake, fleet):
    fleet.start("e1")
    url = fleet.becomes("e1", "ready").url
    fake.lose_supervisor("e1")
    assert until(lambda: answers(url) is None, 15)


def test_a_lease_that_is_not_renewed_ends_the_engine(fake, fleet, monkeypatch):
    monkeypatch.setattr(launches, "LEASE_S", 1.0)
    fleet.start("e1")
    url = fleet.becomes("e1", "ready").url
    until(lambda: answers(url) is None, 15)
    until(lambda: fake._state("e1")["status"] == "FAILED")
    assert fleet.look("e1").error == "its lease was not renewed for 1 s"


def test_a_job_without_a_first_lease_starts_nothing(fake, fleet, monkeypatch):
    monkeypatch.setattr(launches, "FIRST_LEASE_S", 0.5)
    fleet.start("e1")
    until(lambda: fake._state("e1")["status"] == "FAILED", 10)
    assert "no worker of Slackline has called" in fleet.look("e1").error


def test_the_head_is_away_and_leases_go_on(fake, fleet, monkeypatch):
    monkeypatch.setattr(launches, "LEASE_S", lease_s := 5.0)
    fleet.start("e1")
    url = fleet.becomes("e1", "ready").url
    fake.hangs.clear()
    until_s = time.monotonic() + lease_s + 1.0
    with monkeypatch.context() as hurried:
        hurried.setattr("workers.provisioners.ray.ASK_S", 0.5)  # many looks in the time of one lease
        while time.monotonic() < until_s:
            with pytest.raises(ClusterUnreachable, match="has not responded"):
                fleet.ray().observe()
    assert answers(url, made_key(fleet.token, "e1")) == 200
    fake.hangs.set()
    fleet.becomes("e1", "ready")


def test_a_cluster_that_forgot_its_jobs_doubles_nothing(fake, fleet, monkeypatch):
    monkeypatch.setattr("workers.provisioners.ray.DRAIN_S", 0.5)
    fleet.start("e1")
    fleet.becomes("e1", "ready")
    fake.forget_all()
    assert fleet.look("e1").state == "lost"
    assert fleet.becomes("e1", "exited").error == "the cluster no longer knows its job"


def test_a_node_that_is_out_of_reach_counts_as_gone_at_last(fake, fleet):
    """127.0.0.9 drops nothing, so an address of documentation that leads nowhere stands for the node."""
    fleet.start("e1")
    fleet.becomes("e1", "ready")
    fake.lose_supervisor("e1")
    fleet.memory = ClusterMemory()
    fleet.change("e1", url="http://192.0.2.77:20000", state="lost", lost_for_s=1.0)
    seen = fleet.look("e1")
    assert (seen.state, "counts as ended in 89 s" in seen.error) == ("lost", True)
    fleet.change("e1", lost_for_s=LOST_S)
    assert fleet.look("e1").state == "exited"


@pytest.mark.parametrize(
    ("error_type", "message", "told"),
    [
        ("RUNTIME_ENV_SETUP_FAILURE", "pip failed", "its runtime environment could not be set up on the node: p"),
        ("JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE", "label gone", "no node of the cluster can run it: label gone"),
        ("JOB_SUPERVISOR_ACTOR_START_TIMEOUT", "900 s", "Ray did not start its job in time: 900 s"),
        ("JOB_SUPERVISOR_ACTOR_DIED", "killed as the node was running low on memory", "its node ran out of memory"),
    ],
)  # fmt: skip
def test_each_failure_is_told(fake, fleet, error_type, message, told):
    fake.free = 0.0
    fleet.start("e1", resources={"fast_device": 1})
    fake.fail("e1", error_type, message)
    fleet.change("e1", state="pending")
    seen = fleet.look("e1")
    assert seen.state == "exited"
    assert seen.error.startswith(told)


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ((200, "text/html", "<html>", {}), "answered with text/html, status 200: RAY_ADDRESS must be"),
        ((200, "application/json", "{broken", {}), "broken JSON"),
        ((200, "application/json", "{}", {}), "did not list its jobs"),
        ((401, "text/plain", "no", {}), "refused the call: it asks for a token"),
        ((403, "text/html", "no", {}), "refused the call"),
        ((302, "text/plain", "", {"Location": "http://127.0.0.1/login"}), "a redirect, which is not followed"),
        ((503, "application/json", "{}", {}), "answered with status 503"),
    ],
)  # fmt: skip
def test_a_cluster_that_is_none_is_told_and_not_empty(fake, fleet, says, told):
    fake.says = says
    with pytest.raises(ClusterUnreachable, match=told.replace("(", r"\(")):
        fleet.ray().observe()


def test_a_token_is_shown(fake, fleet):
    fake.token = "cluster-token"
    assert fleet.ray().observe() == []


def test_nobody_listens_at_the_address():
    gone = RayProvisioner(RayCluster("default", "http://127.0.0.1:9"), TOKEN, {})
    with pytest.raises(ClusterUnreachable, match="cannot be reached"):
        gone.observe()


def test_a_stray_job_of_ours_is_stopped(fake, fleet):
    fleet.start("e1")
    fleet.becomes("e1", "ready")
    fleet.rows.clear()
    [stray] = fleet.ray().observe()
    assert (stray.id, stray.state) == ("e1", "starting")
    fleet.ray().stop("e1", 1.0)
    until(lambda: fake.jobs["e1"]["status"] in ("STOPPED", "SUCCEEDED"))


def test_an_id_that_is_used_again_gets_a_new_job(fake, fleet):
    fleet.start("e1", "dies")
    fleet.becomes("e1", "exited")
    fleet.rows["e1"] = KnownJob(made="2.0")
    assert fleet.look("e1") is None
    fleet.start("e1")
    fleet.becomes("e1", "ready")


def test_an_id_whose_earlier_job_still_runs_waits_for_its_end(fake, fleet):
    """Its row was removed and made again meanwhile. What runs is not ended by a start, nor doubled."""
    fleet.start("e1")
    pid, process = fleet.becomes("e1", "ready").pid, fake.processes["e1"]
    fleet.rows["e1"] = KnownJob(made="2.0")
    fleet.start("e1")
    assert (fake.jobs["e1"]["status"], ended(pid)) == ("RUNNING", False)
    assert fake.processes["e1"] is process
    psutil.Process(pid).kill()
    until(lambda: fake._state("e1")["status"] == "FAILED")
    fleet.start("e1")
    assert fleet.becomes("e1", "ready").pid != pid


def test_an_instance_that_has_ended_is_not_run_again(fake, fleet):
    """Neither by a worker that was killed before it recorded the end, nor by a start that came late."""
    fleet.start("e1", "dies")
    fleet.becomes("e1", "exited")
    process = fake.processes["e1"]
    fleet.start("e1")
    assert fake.processes["e1"] is process
    assert fleet.look("e1").state == "exited"


def test_what_shall_end_gets_no_further_lease(fleet, monkeypatch):
    """So that an engine which the call to end does not reach ends by itself."""
    fleet.start("e1")
    fleet.becomes("e1", "ready")
    renewed, lease = [], LauncherClient.lease

    async def counted(client):
        renewed.append(client.instance)
        return await lease(client)

    monkeypatch.setattr(LauncherClient, "lease", counted)
    fleet.look("e1")
    assert renewed == ["e1"]
    for shall_end in ({"wanted": False}, {"wanted": True, "state": "lost"}):
        fleet.change("e1", **shall_end)
        fleet.ray().observe()
    assert renewed == ["e1"]


def test_calls_without_the_token_are_refused(fleet):
    fleet.start("e1")
    url = fleet.becomes("e1", "ready").url
    control = url.rpartition(":")[0] + f":{int(url.rpartition(':')[2]) + 1}"
    assert requests.post(f"{control}/end", json={}, timeout=2).status_code == 401
    assert requests.post(f"{control}/end", json={}, headers={"Authorization": "Bearer x"}, timeout=2).status_code == 401
    assert set(requests.get(f"{control}/whose", timeout=2).json()) == {"token_sha256"}
    assert fleet.look("e1").state == "ready"


def test_a_hang_costs_the_limit_of_a_look(fake, fleet):
    fake.hangs.clear()
    threading.Timer(10.0, fake.hangs.set).start()
    began = time.monotonic()
    with pytest.raises(ClusterUnreachable, match=r"has not responded"):
        fleet.ray().observe()
    assert time.monotonic() - began < 4.0


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
def test_the_clock_of_a_node_does_not_date_a_start(fleet, monkeypatch, ahead_s):
    """An hour ahead, it would read as a new run under the same id; behind, as a start that took too long."""
    source = Path(launches.launcher.__file__).read_text().replace("time.time()", f"(time.time() + {ahead_s})")
    packed = base64.b64encode(zlib.compress(source.encode())).decode()
    program = f"\"import base64,zlib;exec(zlib.decompress(base64.b64decode('{packed}')))\""
    monkeypatch.setattr(launches, "_program", lambda: program)
    began = time.time()
    fleet.start("e1")
    first = fleet.becomes("e1", "ready")
    later = fleet.look("e1")
    assert began - 2.0 < first.started_at <= time.time()
    assert later.started_at <= first.started_at + 1.0, "the tolerance of `converge` for one and the same run"
    assert first.steps["process"] == first.started_at
    assert first.started_at < first.steps["ready"] <= time.time(), "by this host's clock"


@pytest.mark.parametrize(
    "said",
    [
        {"age_s": "x"}, {"age_s": math.nan}, {"age_s": -1.0}, {"age_s": True}, {"age_s": [1]}, {"asked_at": None},
        {"steps_s": "ready"}, {"steps_s": {"ready": math.nan}}, {"steps_s": {"\0": 1.0}}, {"steps_s": {"ready": "1"}},
        {"steps": "ready"}, {"steps": {"ready": 2.0}}, {"steps": {"process": math.nan, "ready": 2.0}},
        {"pid": "1"}, {"exit_code": True}, {"error": "\0\ud800"},
    ],
)  # fmt: skip
def test_a_launcher_that_tells_nonsense_holds_nobody_up(said):
    """What is none of its figures would fail where all instances are reconciled, or be refused by PostgreSQL."""
    seen = _reported("i-1", {"state": "ready", "port": 20000, "age_s": 1.0, "asked_at": 9.0, **said}, "h", KnownJob())
    assert (seen.state, seen.pid, seen.exit_code, seen.error, seen.steps) == ("ready", None, None, "", {})
    assert seen.started_at == (8.0 if not said.keys() & {"age_s", "asked_at"} else None)


def test_steps_that_an_earlier_launcher_tells_by_its_clock_are_told_by_ours():
    """Jobs that run while Slackline is upgraded go on with their launcher."""
    said = {"state": "ready", "port": 20000, "age_s": 60.0, "asked_at": 1000.0}
    steps = {"process": 5000.0, "ready": 5030.0}
    seen = _reported("i-1", {**said, "steps": steps}, "h", KnownJob())
    assert (seen.started_at, seen.steps) == (940.0, {"process": 940.0, "ready": 970.0})
    assert _reported("i-1", {**said, "steps_s": {"process": 0.0, "ready": 30.0}}, "h", KnownJob()).steps == seen.steps


def test_a_dashboard_that_tells_nonsense_is_read_without_it(fleet, monkeypatch):
    told = {"labels": {"zone": "a\0b", "n": 1}, "resources_total": {"GPU": math.nan, "CPU": "4", "\0": 1.0}}
    monkeypatch.setattr(fake_cluster, "NODE", {**fake_cluster.NODE, **told, "node_ip": "10.0.0.1\0"})
    monkeypatch.setattr(fake_cluster, "RESOURCES", told["resources_total"])
    ray = fleet.ray()
    ray.observe()
    [host] = ray.hosts()
    assert (host.name, host.resources, host.labels) == ("10.0.0.1", {"": (1.0, 1.0)}, {"zone": "ab", "n": "1"})


@pytest.mark.parametrize("port", ["1@other:80/", None, 0, 99999, True, 20000.0])
def test_a_launcher_that_tells_no_port_names_no_other_host(port):
    seen = _reported("i-1", {"state": "ready", "port": port}, "10.0.0.5", KnownJob())
    assert (seen.state, seen.url, seen.error) == ("unhealthy", "", "its launcher reported no port")
    assert _reported("i-1", {"state": "ready", "port": 20000}, "10.0.0.5", KnownJob()).url == "http://10.0.0.5:20000"
