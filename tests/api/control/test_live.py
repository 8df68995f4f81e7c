"""Attainment, queue and health: what gateways publish in Redis, and what is said when nobody publishes."""

import datetime as dt
import threading
import time

import orjson
import pytest
import redis
from django.conf import settings

from controller.core.messages import (
    COMMAND_ANSWER_KEY,
    COMMAND_CHANNEL,
    FLEET_KEY,
    GATEWAYS_KEY,
    HEARTBEAT_KEY,
    LIVE_QUEUE,
    QUEUE_ASKED_KEY,
    QUEUE_KEY,
    WATCHED_KEY,
)
from controller.models import AttainmentMinute, Decision, histogram
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


@pytest.fixture
def board(redis_server):
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.flushdb()
    yield client
    client.flushdb()
    client.close()


@pytest.fixture
def no_redis():
    """An address where nobody listens."""
    before, settings.REDIS_URL = settings.REDIS_URL, "redis://127.0.0.1:1/0"
    yield
    settings.REDIS_URL = before


def window(tenant="acme", slo_class="chat", **fields):
    return {
        "tenant": tenant, "slo_class": slo_class, "window_s": 60.0, "finished": 10, "attained": 8, "ttft_met": 9,
        "tpot_met": 8, "refused": 1, "failed": 0, "cancelled": 2, "goodput_tokens": 100, "target": 0.95, "queued": 3,
        "oldest_slack_s": 0.5, "ttft_p50_s": 0.2, "ttft_p95_s": 0.9, "tpot_p50_s": 0.05, "miss_reason": "tpot",
        **fields,
    }  # fmt: skip


def publish_fleet(board, gateway="g1", age_s=0.0, classes=()):
    message = {
        "gateway": gateway, "at": time.time() - age_s, "seq": 1, "period_s": 1.0, "instances": [], "queued": 3,
        "queued_tokens": 30, "in_flight": 1, "arrival_rate": 1.0, "service_rate": 1.0, "wait_over_slo": 0.1,
        "classes": list(classes), "policy": "slackline",
    }  # fmt: skip
    board.sadd(GATEWAYS_KEY, gateway)
    board.set(FLEET_KEY.format(gateway=gateway), orjson.dumps(message))


def row(name, slack_s, tenant="acme", slo_class="chat"):
    """`slack_s` now."""
    now = time.time()
    return {
        "id": name, "tenant": tenant, "slo_class": slo_class, "model": "demo", "prompt_tokens": 10, "output_tokens": 20,
        "ttft_s": 1.0, "arrived_at": now - 0.5, "due_at": now + slack_s, "order": [0.0, now + slack_s],
        "hopeless": slack_s < 0, "paused": False, "priority": 0,
    }  # fmt: skip


def publish_queue(board, rows, gateway="g1", age_s=0.0, asked=10):
    """As an answer to whoever asks first."""
    message = {
        "gateway": gateway, "feed": "f", "version": 1, "asked": asked, "at": time.time() - age_s, "rates": {},
        "rows": rows,
    }  # fmt: skip
    board.set(QUEUE_KEY.format(gateway=gateway), orjson.dumps(message))


# ---- attainment -----------------------------------------------------------------------------------------------------


def test_now_is_what_all_gateways_measured(viewer, board):
    publish_fleet(board, "g1", classes=[window(), window(slo_class="batch", finished=0, attained=0)])
    publish_fleet(board, "g2", classes=[window(finished=30, attained=30, oldest_slack_s=-1.0, ttft_p50_s=0.6)])
    shown = viewer.get("/attainment").data
    assert shown["window"] == "now"
    assert shown["age_s"] < 5
    batch, chat = shown["items"]
    assert (chat["finished"], chat["attained"], chat["attainment"]) == (40, 38, 0.95)
    assert chat["oldest_slack_s"] == -1.0
    assert chat["ttft_p50_s"] == pytest.approx(0.5)
    assert batch["attainment"] is None
    assert chat["first_tokens"] is None, "a gateway that does not tell"


def test_whose_the_first_token_times_are_is_told(viewer, board):
    told = {"sampled": 10, "in_one_piece": 1}
    publish_fleet(board, "g1", classes=[window(first_tokens=2, **told)])
    publish_fleet(board, "g2", classes=[window(first_tokens=5, **told)])
    (chat,) = viewer.get("/attainment").data["items"]
    assert (chat["finished"], chat["first_tokens"]) == (20, 7)


def test_an_old_message_is_not_now(viewer, board):
    publish_fleet(board, age_s=10, classes=[window()])
    answer = viewer.get("/attainment")
    assert (answer.status_code, answer.data["error"]["code"]) == (503, "live_data_unavailable")


def test_a_key_sees_its_own_attainment_alone(tenant, tenant_key, board):
    publish_fleet(board, classes=[window(tenant=tenant.name), window(tenant="other")])
    assert [each["tenant"] for each in tenant_key.get("/attainment").data["items"]] == [tenant.name]
    for name in ("now", "hour"):
        assert tenant_key.get("/attainment", window=name, tenant="other").data["items"] == []


def roll_up(tenant, slo_class, minutes_ago, finished, attained):
    minute = dt.datetime.now(dt.UTC).replace(second=0, microsecond=0) - dt.timedelta(minutes=minutes_ago)
    counts = [0] * histogram.SIZE
    counts[histogram.bucket(0.2)] = finished
    AttainmentMinute.objects.create(
        minute=minute, tenant=tenant, slo_class=slo_class, model="demo", finished=finished, attained=attained,
        ttft_met=attained, tpot_met=finished, refused=0, expired=finished - attained, failed=0, cancelled=1,
        prompt_tokens=1, output_tokens=1, goodput_tokens=7, ttft_histogram=counts, tpot_histogram=counts,
        e2e_histogram=counts,
    )  # fmt: skip


def test_hour_and_day_are_what_was_recorded(viewer, tenant):
    factories.slo_class(name="chat", target=0.9)
    factories.slo_class(name="chat", tenant=tenant, target=0.99)
    roll_up(tenant.name, "chat", 5, 10, 9)
    roll_up(tenant.name, "chat", 120, 10, 1)
    roll_up("other", "chat", 5, 4, 4)
    roll_up("other", "", 5, 1, 0)
    hour = {
        (each["tenant"], each["slo_class"]): each for each in viewer.get("/attainment", window="hour").data["items"]
    }
    assert {key: each["attainment"] for key, each in hour.items()} == {
        (tenant.name, "chat"): 0.9, ("other", "chat"): 1.0, ("other", ""): 0.0,
    }  # fmt: skip
    assert [hour[key]["target"] for key in sorted(hour)] == [None, 0.9, 0.99]
    assert hour[tenant.name, "chat"]["expired"] == 1
    assert 0.15 <= hour[tenant.name, "chat"]["ttft_p50_s"] <= 0.2
    assert hour[tenant.name, "chat"]["first_tokens"] == 10
    day = viewer.get("/attainment", window="day", tenant=tenant.name, slo_class="chat").data["items"]
    assert [each["attainment"] for each in day] == [0.5]


def test_a_window_without_records_is_empty(viewer):
    assert viewer.get("/attainment", window="day").data["items"] == []


def test_another_window_is_refused(viewer):
    assert "window" in viewer.get("/attainment", window="week").data["error"]["fields"]


# ---- queue ----------------------------------------------------------------------------------------------------------


def test_the_queue_shows_the_most_urgent_of_all_gateways(viewer, board):
    publish_fleet(board, "g1")
    publish_fleet(board, "g2")
    publish_queue(board, [row("a", 3.0), row("b", 1.0)], "g1")
    publish_queue(board, [row("c", 2.0), row("d", 0.1, slo_class="batch")], "g2")
    shown = viewer.get("/queue", limit=3).data
    assert [each["id"] for each in shown["items"]] == ["d", "b", "c"]
    assert (shown["total"], shown["gateways"], shown["missing"]) == (4, 2, 0)
    chat = next(each for each in shown["by_class"] if each["slo_class"] == "chat")
    assert (chat["count"], chat["oldest_slack_s"]) == (3, pytest.approx(1.0, abs=0.1))
    assert shown["items"][0]["slack_s"] == pytest.approx(0.1, abs=0.1)
    assert shown["items"][0]["waited_s"] == pytest.approx(0.5, abs=0.1)
    assert int(board.get(QUEUE_ASKED_KEY)) == 1
    assert [each["id"] for each in viewer.get("/queue", slo_class="batch").data["items"]] == ["d"]
    assert board.exists(WATCHED_KEY.format(topic=LIVE_QUEUE))


def test_a_queue_that_one_gateway_does_not_publish_says_so(viewer, board, monkeypatch):
    monkeypatch.setattr("api.control.queue.FIRST_LOOK_S", 0.0)
    publish_fleet(board, "g1")
    publish_fleet(board, "g2")
    publish_queue(board, [row("a", 1.0)], "g1")
    publish_queue(board, [row("b", 1.0)], "g2", age_s=60, asked=0)
    shown = viewer.get("/queue").data
    assert ([each["id"] for each in shown["items"]], shown["missing"]) == (["a"], 1)


def test_a_key_sees_its_own_rows_and_counts_alone(tenant, tenant_key, board):
    publish_fleet(board)
    publish_queue(board, [row("own", 1.0, tenant=tenant.name), row("theirs", 0.5), row("more", 0.5)])
    shown = tenant_key.get("/queue").data
    assert [each["id"] for each in shown["items"]] == ["own"]
    assert (shown["total"], len(shown["by_class"])) == (1, 1)
    assert tenant_key.get("/queue", tenant="acme").data["items"] == []


def test_no_gateway_means_unavailable(viewer, board):
    assert viewer.get("/queue").status_code == 503


class Gateway(threading.Thread):
    """Hears one command and answers as told."""

    def __init__(self, board, applied=(), gone=(), too_late=()):
        super().__init__(daemon=True)
        self.board, self.heard = board, None
        self.answer = {"gateway": "g1", "applied": list(applied), "gone": list(gone), "too_late": list(too_late)}
        self.pubsub = board.pubsub(ignore_subscribe_messages=True)
        self.pubsub.subscribe(COMMAND_CHANNEL.format(gateway="g1"))
        self.pubsub.get_message(timeout=1)
        self.start()

    def run(self):
        while (message := self.pubsub.get_message(timeout=5)) is None:
            pass
        self.heard = orjson.loads(message["data"])
        key = COMMAND_ANSWER_KEY.format(command=self.heard["id"])
        self.board.rpush(key, orjson.dumps({"command": self.heard["id"], **self.answer}))
        self.pubsub.close()


def test_a_command_says_what_became_of_each_request(operator, board):
    publish_fleet(board)
    gateway = Gateway(board, applied=["a"], too_late=["b"])
    answer = operator.post("/queue/cancel", {"request_ids": ["a", "b", "c", "a"]})
    assert answer.status_code == 200, answer.data
    assert (answer.data["applied"], answer.data["too_late"], answer.data["gone"]) == (["a"], ["b"], ["c"])
    assert (gateway.heard["actor"], gateway.heard["kind"]) == (operator.user.username, "cancel")
    decision = Decision.objects.get(pk=answer.data["decision"])
    assert (decision.kind, decision.actor) == ("queue_cancel", operator.user.username)
    assert decision.outcome["applied"] == ["a"]
    assert decision.inputs["request_ids"] == ["a", "b", "c"]


@pytest.mark.parametrize("kind", ["pause", "resume"])
def test_requests_are_paused_and_resumed(operator, board, kind):
    publish_fleet(board)
    gateway = Gateway(board, applied=["a"])
    assert operator.post(f"/queue/{kind}", {"request_ids": ["a"]}).data["applied"] == ["a"]
    assert gateway.heard["kind"] == kind
    assert Decision.objects.get(kind=f"queue_{kind}").request_id == "a"


def test_a_new_priority_is_part_of_the_record(operator, board):
    publish_fleet(board)
    gateway = Gateway(board, applied=["a"])
    assert operator.post("/queue/reprioritise", {"request_ids": ["a"], "priority": 2}).status_code == 200
    assert gateway.heard["priority"] == 2
    assert Decision.objects.get(kind="queue_reprioritise").inputs["priority"] == 2


def test_a_command_no_one_answers_is_audited_too(operator, board):
    answer = operator.post("/queue/cancel", {"request_ids": ["a"]})
    assert answer.status_code == 503
    assert Decision.objects.get(kind="queue_cancel").outcome["gateways"] == 0


@pytest.mark.usefixtures("no_redis")
def test_a_command_with_redis_away_is_audited_too(operator):
    answer = operator.post("/queue/cancel", {"request_ids": ["a"]})
    assert (answer.status_code, answer.data["error"]["code"]) == (503, "live_data_unavailable")
    assert "error" in Decision.objects.get(kind="queue_cancel").outcome


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("cancel", {}, "request_ids"),
        ("cancel", {"request_ids": []}, "request_ids"),
        ("cancel", {"request_ids": ["x" * 65]}, "request_ids.0"),
        ("cancel", {"request_ids": ["x"] * 501}, "request_ids"),
        ("cancel", {"request_ids": ["a"], "priority": 1}, "priority"),
        ("reprioritise", {"request_ids": ["a"]}, "priority"),
        ("reprioritise", {"request_ids": ["a"], "priority": -1}, "priority"),
    ],
)
def test_a_wrong_command_is_named(operator, path, body, field):
    answer = operator.post(f"/queue/{path}", body)
    assert answer.status_code == 400, answer.data
    assert field in answer.data["error"]["fields"], answer.data
    assert not Decision.objects.exists()


# ---- health ---------------------------------------------------------------------------------------------------------


def states(answer):
    return {each["name"]: each["state"] for each in answer.data["components"]}


def test_health_is_ok_when_all_is_well(viewer, board):
    publish_fleet(board)
    for process in ("worker", "analysis", "beat"):
        board.set(HEARTBEAT_KEY.format(process=process), time.time())
    answer = viewer.get("/health")
    assert answer.data["status"] == "ok", answer.data
    assert set(states(answer)) == {"postgres", "redis", "gateway g1", "worker", "analysis", "beat", "jobs"}


def test_health_says_what_is_old_and_what_is_missing(viewer, board):
    publish_fleet(board, age_s=30)
    board.set(HEARTBEAT_KEY.format(process="worker"), time.time() - 20)
    answer = viewer.get("/health")
    assert answer.data["status"] == "degraded"
    found = states(answer)
    assert (found["gateway g1"], found["worker"], found["beat"]) == ("stale", "stale", "down")


@pytest.mark.usefixtures("no_redis")
def test_without_redis_the_rest_is_unknown(viewer):
    found = states(viewer.get("/health"))
    unknown = dict.fromkeys(("gateway", "worker", "analysis", "beat", "jobs"), "unknown")
    assert found == {"postgres": "ok", "redis": "down", **unknown}


@pytest.mark.usefixtures("no_redis")
def test_without_redis_live_data_is_unavailable(viewer):
    for path in ("/attainment", "/queue"):
        assert viewer.get(path).data["error"]["code"] == "live_data_unavailable"
    assert viewer.get("/attainment", window="hour").status_code == 200
