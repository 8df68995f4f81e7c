"""A fake of a Ray dashboard's Jobs REST, as Ray 2.60 was seen to answer: jobs run as real processes of this machine,
and a test says what else happens. Nothing of Ray itself is in it."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

NODE = {"node_id": "n1", "node_ip": "127.0.0.1", "state": "ALIVE", "labels": {"zone": "a", "ray.io/node-id": "n1"}}
RESOURCES = {"fast_device": 4.0, "node:127.0.0.1": 1.0, "memory": 1e9}


class FakeCluster:
    """`free`: devices that no job has. `says`: an answer for all calls instead, as (status, type, body, headers).
    `hangs`: no call is answered. `agents`: whether nodes give logs. `refuses`: why no job is accepted."""

    def __init__(self):
        self.jobs, self.processes, self.free, self.submitted = {}, {}, 4.0, []
        self.says, self.hangs, self.token, self.agents = None, threading.Event(), "", True
        self.refuses = ""
        self.hangs.set()
        self.environment = {}
        self.folder = Path(tempfile.mkdtemp(prefix="fake-ray-"))
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                fake._answer(self)

            do_POST = do_DELETE = do_GET

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.hangs.set()
        for process in self.processes.values():
            _kill(process, signal.SIGKILL)
            process.wait(10)
        self.server.shutdown()
        self.server.server_close()
        shutil.rmtree(self.folder)

    # -- what happens on a cluster ---------------------------------------------------------------------------------

    def lose_supervisor(self, id, group=True):
        """As the loss of a raylet: the job fails, and the process group of its command is killed after a while."""
        job = self.jobs[id]
        job |= {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "The actor died unexpectedly"}
        if group:
            _kill(self.processes[id], signal.SIGKILL)

    def fail(self, id, error_type, message):
        self.jobs[id] |= {"status": "FAILED", "error_type": error_type, "message": message}

    def forget_all(self):
        """As a head that starts again without what it knew."""
        self.jobs.clear()

    def adds(self, devices):
        self.free += devices
        for id, job in self.jobs.items():
            if job["status"] == "PENDING":
                self._place(id)

    # -- the REST --------------------------------------------------------------------------------------------------

    def _answer(self, request):
        length = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(length)) if length else None
        self.hangs.wait(20)
        status, kind, said, headers = self.says or self._said(request, body)
        raw = said.encode()
        try:
            request.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(raw)), **headers}.items():
                request.send_header(name, value)
            request.end_headers()
            request.wfile.write(raw)
        except OSError:
            pass

    def _said(self, request, body):  # noqa: PLR0911
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return 401, "text/plain", "Unauthorized", {}
        method, path = request.command, request.path.partition("?")[0]
        parts = path.strip("/").split("/")
        if path == "/api/jobs/" and method == "GET":
            return _json([self._state(id) for id in self.jobs])
        if path == "/api/jobs/" and method == "POST":
            return self._submit(body)
        if path == "/api/v0/nodes":
            node = {**NODE, "resources_total": RESOURCES}
            return _json({"data": {"result": {"result": [node]}}})
        if path == "/api/cluster_status":  # names in camel case, as the dashboard changes them
            used = {"n1": {"fastDevice": [4.0 - self.free, 4.0], "memory": [0.0, 1e9]}}
            return _json({"data": {"clusterStatus": {"loadMetricsReport": {"usageByNode": used}}}})
        if parts[:2] == ["api", "jobs"] and (id := parts[2]) in self.jobs:
            return self._one(method, id, parts[3:])
        return 404, "text/plain", "Job not found", {}

    def _one(self, method, id, rest):
        if rest == ["logs"]:
            if not self.agents:
                return 500, "text/plain", "InvalidUrlClientError: http://127.0.0.1:-1/", {}
            return _json({"logs": (self.folder / id).read_text(errors="replace") if id in self.processes else ""})
        if rest == ["stop"]:
            self._stop(id)
            return _json({"stopped": True})
        if method == "DELETE":
            del self.jobs[id]
            return _json({"deleted": True})
        return _json(self._state(id))

    def _submit(self, body):
        id = body["submission_id"]
        self.submitted.append(body)
        if self.refuses:
            return 400, "text/plain", self.refuses, {}
        if id in self.jobs:
            return (
                500,
                "text/plain",
                f"Traceback (most recent call last):\nValueError: Job with submission_id {id} exists",
                {},
            )
        self.jobs[id] = {
            "submission_id": id, "status": "PENDING", "message": "Job has not started yet.", "error_type": None,
            "metadata": body.get("metadata"), "entrypoint": body["entrypoint"], "driver_exit_code": None,
            "driver_agent_http_address": None,
            "devices": (body.get("entrypoint_resources") or {}).get("fast_device", 0),
        }  # fmt: skip
        self._place(id)
        return _json({"submission_id": id})

    def _place(self, id):
        job = self.jobs[id]
        if job["devices"] > self.free:
            return
        self.free -= job["devices"]
        log = (self.folder / id).open("w")
        log.write(f"Running entrypoint for job {id}: {job['entrypoint']}\n")
        log.flush()
        self.processes[id] = subprocess.Popen(
            job["entrypoint"], shell=True, start_new_session=True, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, **self.environment},
        )  # fmt: skip
        job |= {"status": "RUNNING", "driver_agent_http_address": "http://127.0.0.1:-1"}

    def _stop(self, id):
        job = self.jobs[id]
        if job["status"] == "PENDING":
            job["status"] = "STOPPED"
        elif job["status"] == "RUNNING":
            _kill(self.processes[id], signal.SIGTERM)
            job["status"] = "STOPPED"

    def _state(self, id):
        job = self.jobs[id]
        process = self.processes.get(id)
        if job["status"] == "RUNNING" and process is not None and (code := process.poll()) is not None:
            self.free += job["devices"]
            job |= {"status": "SUCCEEDED", "driver_exit_code": 0, "message": "Job finished successfully."}
            if code:
                code = 128 - code if code < 0 else code
                tail = "\n".join((self.folder / id).read_text().splitlines()[-10:])
                said = f"Job entrypoint command failed with exit code {code}, last available logs:\n{tail}"
                job |= {"status": "FAILED", "driver_exit_code": code, "message": said}
                job["error_type"] = "JOB_ENTRYPOINT_COMMAND_ERROR"
        return {name: value for name, value in job.items() if name != "devices"}


def _kill(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    if number == signal.SIGKILL:
        deadline = time.monotonic() + 5
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)


def _json(said):
    return 200, "application/json; charset=utf-8", json.dumps(said), {}
