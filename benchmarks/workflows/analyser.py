"""What Slackline's analyser learns before the comparison, as the product does.

A gateway serves an earlier run of another seed and records it; the Celery tasks train the lengths' forest and the
pattern graphs on those records, judge them, and publish or refuse them. What the gateway itself learned meanwhile is
its state file, with which every compared gateway begins, whether it has the analyser or not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.servers.engines import ROOT
from benchmarks.servers.stack import Stack

RECORDER = "recorder"
TASKS = "import django; django.setup(); from workers.tasks import graphs, lengths; lengths.train(); graphs.train()"
VERSIONS = {"lengths": "length_version", "graphs": "graph_version"}
JUDGED = {
    "lengths": ("answers", "coverage", "pinball", "class_pinball"),
    "graphs": ("workflows", "graphs", "matched", "error", "even_error"),
}
PATIENCE_S = 60.0
IDLE_S = 120.0  # as in workers.analysis.graph_versions, which needs Django
SETTLE_S = 5.0  # more than a workflow must have been over before graphs are made of it


@dataclass(slots=True)
class Analyser:
    """Of one stack. `content`: of the versions in force, by table; those that were refused have none."""

    stack: Stack
    recorded_until: float = 0.0  # monotonic
    content: dict[str, bytes] = field(default_factory=dict)
    judged: dict[str, Any] = field(default_factory=dict)

    def wait_recorded(self, calls: int) -> None:
        """Until so many answers of the gateway are stored. Raises RuntimeError after PATIENCE_S."""
        end = time.monotonic() + PATIENCE_S
        while (found := self._count()) < calls:
            if time.monotonic() > end:
                raise RuntimeError(f"{found} of {calls} answers are recorded after {PATIENCE_S:.0f} s")
            time.sleep(0.25)
        self.recorded_until = time.monotonic()

    def train(self) -> None:
        """Raises RuntimeError if a task fails."""
        time.sleep(max(0.0, self.recorded_until + IDLE_S + SETTLE_S - time.monotonic()))
        done = subprocess.run(
            [sys.executable, "-c", TASKS],
            cwd=ROOT,
            env={**os.environ, **self.stack.environment, "SLACKLINE_ROLE": "worker"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"training failed: {done.stderr[-2000:]}")
        for part, table in VERSIONS.items():
            names = (*JUDGED[part], "refused")
            rows = self._read(f"SELECT content, {', '.join(names)} FROM {table} WHERE version = 1")
            if not rows:
                self.judged[part] = None
                continue
            content, *figures = rows[0]
            self.judged[part] = {
                name: round(of, 4) if isinstance(of, float) else of for name, of in zip(names, figures, strict=True)
            }
            if content is not None:
                self.content[table] = bytes(content)

    def put(self, *, in_force: bool) -> None:
        """Put the versions in force, or take them out."""
        with closing(self._connect()) as connection:
            for table, content in self.content.items():
                query = f"UPDATE {table} SET content = %s WHERE version = 1"
                connection.execute(query.encode(), [content if in_force else None])

    def wait_used(self, url: str, *, in_force: bool) -> None:
        """Until the gateway has taken them over. Raises RuntimeError after PATIENCE_S."""
        wanted = set(self.content) if in_force else set()
        end = time.monotonic() + PATIENCE_S
        while (found := versions_used(url)) != wanted:
            if time.monotonic() > end:
                raise RuntimeError(f"the gateway uses {sorted(found)} and not {sorted(wanted)}")
            time.sleep(0.1)

    def hand_on(self, gateway_id: str) -> None:
        """Let a gateway of this name begin with what the recording one has learned."""
        folder: Path = self.stack.folder
        shutil.copy2(folder / f"{RECORDER}.learned.json", folder / f"{gateway_id}.learned.json")

    def now(self) -> float:
        """Seconds since 1970 by the database's clock."""
        return float(self._read("SELECT extract(epoch FROM clock_timestamp())")[0][0])

    def records_since(self, start: float, calls: int) -> list[dict[str, Any]]:
        """What is recorded of the requests that arrived since then, once that is of so many of them or PATIENCE_S are
        over."""
        query = f"SELECT to_jsonb(request_record) FROM request_record WHERE arrived_at >= to_timestamp({start})"
        end = time.monotonic() + PATIENCE_S
        while len(rows := self._read(f"{query} ORDER BY arrived_at")) < calls and time.monotonic() < end:
            time.sleep(0.25)
        return [row for (row,) in rows]

    def _count(self) -> int:
        rows = self._read("SELECT count(*) FROM request_record WHERE length_features <> '[]'")
        return int(rows[0][0])

    def _read(self, query: str) -> Sequence[tuple[Any, ...]]:
        with closing(self._connect()) as connection:
            return connection.execute(query.encode()).fetchall()

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.stack.environment["DATABASE_URL"], autocommit=True)


def versions_used(url: str) -> set[str]:
    """Tables of which a gateway uses a version, by its /metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    used = {table: [line for line in lines if line.startswith(f"slackline_{table}{{")] for table in VERSIONS.values()}
    return {table for table, found in used.items() if any(float(line.rsplit(" ", 1)[1]) > 0 for line in found)}


def point_at(stack: Stack, urls: Sequence[str]) -> None:
    """Let the stack's instances be these engines, for the gateways that start from now on."""
    with psycopg.connect(stack.environment["DATABASE_URL"], autocommit=True) as connection:
        for index, url in enumerate(urls):
            connection.execute("UPDATE instance SET url = %s WHERE id = %s", [url, f"engine-{index}"])
