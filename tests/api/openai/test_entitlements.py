"""What a tenant may ask for, and how much of the queue it may have, through a whole gateway."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from api.openai.protocol.errors import ApiError
from api.openai.tenants import Held, QueueBounds, Quotas
from controller.core.snapshot import ClassConfig, Entitlements, GatewaySnapshot, ModelConfig, TenantConfig
from tests.api.openai.gateways import KEY, Client, TestBed, completion, key_config, settled, snapshot
from tests.waiting import until_on_loop
from workers.backends.fake import Script

OTHER = "sk-other-key"
LONG = 1_000_000
CLASSES = tuple(ClassConfig(name, None, 2.0, 0.1, None, 10.0, 0.95, 1.0) for name in ("chat", "batch"))


def config(entitled: Entitlements) -> GatewaySnapshot:
    """`acme` with these entitlements, and `other`, which may do all."""
    return snapshot(
        tenants=(TenantConfig(1, "acme", "chat", entitled=entitled), TenantConfig(2, "other", "chat")),
        keys=(key_config(), key_config(OTHER, id=2, tenant="other")),
        classes=CLASSES,
        models=(
            ModelConfig("demo", ("gpt",), context_tokens=1_000_000),
            ModelConfig("large", context_tokens=1_000_000),
        ),
    )


ASKS = [
    ({"allowed_classes": ("batch", "chat")}, {"slo_class": "chat"}, None, ""),
    ({"allowed_classes": ("batch",)}, {"slo_class": "chat"}, "slo_class", "allowed_classes allows batch"),
    ({"allowed_models": ("demo",)}, {"model": "gpt"}, None, ""),
    ({"allowed_models": ("large",)}, {"model": "gpt"}, "model", "allowed_models allows large"),
    ({"highest_priority": 3}, {"priority": 3}, None, ""),
    ({"highest_priority": 3}, {"priority": 2}, "priority", "highest_priority allows 3 and above"),
    ({"highest_priority": 3}, {}, None, ""),
    ({"tightest_ttft_s": 0.5}, {"target_ttft": 0.5}, None, ""),
    ({"tightest_ttft_s": 0.5}, {"target_ttft": 0.4}, "target_ttft", "tightest_ttft_s allows 0.5 s or more"),
    ({"tightest_tpot_s": 0.05}, {"target_tbt": 0.04}, "target_tbt", "tightest_tpot_s allows 0.05 s or more"),
    ({"tightest_deadline_s": 9.0}, {"deadline": 8.0}, "deadline", "tightest_deadline_s allows 9 s or more"),
    ({"tightest_ttft_s": 0.5}, {"deadline": 0.4}, "deadline", "tightest_ttft_s allows 0.5 s or more"),
    ({"tightest_ttft_s": 0.5}, {"deadline": 0.5}, None, ""),
    (
        {"tightest_ttft_s": 0.5},
        {"workflow_deadline": 0.4, "metadata": {"workflow_id": "w"}},
        "workflow_deadline",
        "tightest_ttft_s allows 0.5 s or more",
    ),
    ({}, {"priority": 0, "target_ttft": 0.1, "slo_class": "batch"}, None, ""),
]


@pytest.mark.parametrize(("entitled", "asked", "field", "told"), ASKS)
async def test_a_tenant_gets_what_it_is_entitled_to(
    entitled: dict[str, Any], asked: dict[str, Any], field: str | None, told: str
) -> None:
    async with TestBed(config(Entitlements(**entitled))) as bed:
        answer = await bed.ask(completion(**asked))
        other = await bed.ask(completion(**asked), key=OTHER)
        assert other.status == 200, "entitlements are of one tenant"
        if field is None:
            assert answer.status == 200
            return
        assert (answer.status, answer.error["code"], answer.error["param"]) == (403, "permission_denied", field)
        assert told in answer.error["message"]
        assert not any(record.tenant == "acme" for record in bed.sink.records)


@pytest.mark.parametrize(
    ("entitled", "least_s"),
    [({"tightest_ttft_s": 0.5}, 0.5), ({"tightest_ttft_s": 0.5, "tightest_deadline_s": 20.0}, 20.0), ({}, 0.03)],
)
async def test_many_steps_of_a_workflow_ask_for_no_more_than_the_tenant_may(
    entitled: dict[str, float], least_s: float
) -> None:
    async with TestBed(config(Entitlements(**entitled))) as bed:
        asked = {"workflow_deadline": 30, "workflow_steps_left": 1000, "metadata": {"workflow_id": "w"}}
        assert (await bed.ask(completion(**asked))).status == 200
        [record] = bed.sink.records
        assert record.target_deadline_s == pytest.approx(least_s, rel=0.05)
        assert record.target_ttft_s == pytest.approx(min(2.0, least_s), rel=0.05)


async def test_the_models_of_others_are_not_listed() -> None:
    async with TestBed(config(Entitlements(allowed_models=("demo",)))) as bed:
        listed = await bed.ask(b"", "/v1/models", method="GET")
        assert b'"demo"' in listed.body
        assert b'"gpt"' in listed.body
        assert b"large" not in listed.body
        assert (await bed.ask(b"", "/v1/models/large", method="GET")).status == 404
        assert (await bed.ask(b"", "/v1/models/large", key=OTHER, method="GET")).status == 200


async def test_a_changed_entitlement_holds_for_the_next_request() -> None:
    async with TestBed(config(Entitlements())) as bed:
        assert (await bed.ask(completion(priority=0))).status == 200
        bed.gateway.configure(config(Entitlements(highest_priority=1)))
        assert (await bed.ask(completion(priority=0))).status == 403


def flood(bed: TestBed, count: int, prompt: str) -> list[Client]:
    return [bed.send(completion(prompt=prompt, stream=True)) for _ in range(count)]


async def test_one_tenant_cannot_fill_the_queue_of_all() -> None:
    async with TestBed(config(Entitlements())) as bed:
        bed.gateway.quotas.most_open = 40
        bed.every(Script(hang_after=0))
        clients = flood(bed, 60, "x")
        await until_on_loop(lambda: sum(client.answer.status == 429 for client in clients) == 40)
        refused = next(client.answer for client in clients if client.answer.status == 429)
        assert refused.error["code"] == "rate_limit_exceeded"
        assert "queue_share 50%" in refused.error["message"]
        assert "20 open requests" in refused.error["message"]
        assert refused.headers["retry-after"]
        honest = bed.send(completion(stream=True), key=OTHER)
        await until_on_loop(lambda: bed.gateway.quotas.active("other") == 1)
        for client in clients:
            if not client.answer.status:
                await client.hang_up()
        await honest.hang_up()
        await until_on_loop(lambda: bed.gateway.quotas.active("acme") == 0)
        bed.every(Script())
        assert (await bed.ask(completion())).status == 200


async def test_large_bodies_count_from_their_first_byte_and_are_given_back() -> None:
    async with TestBed(config(Entitlements(queue_share=0.25))) as bed:
        quotas = bed.gateway.quotas
        quotas.bounds = QueueBounds(body_bytes=400_000, share=1.0)
        bed.every(Script(hang_after=0))
        clients = flood(bed, 3, "x" * 45_000)
        await until_on_loop(lambda: any(client.answer.status for client in clients))
        (refused,) = (client.answer for client in clients if client.answer.status)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert "queue_share 25%" in refused.error["message"]
        assert 90_000 < quotas.body_bytes < 100_000
        mine = [bed.send(completion(prompt="x" * 90_000, stream=True), key=OTHER) for _ in range(3)]
        await until_on_loop(lambda: any(client.answer.status for client in mine))
        (full,) = (client.answer for client in mine if client.answer.status)
        assert "all tenants" in full.error["message"]
        for client in (*clients, *mine):
            if not client.answer.status:
                await client.hang_up()
        assert quotas.body_bytes == 0


async def test_large_bodies_of_others_leave_room_for_small_ones() -> None:
    async with TestBed(config(Entitlements())) as bed:
        bed.gateway.quotas.bounds = QueueBounds(body_bytes=640_000, share=1.0)
        bed.every(Script(hang_after=0))
        clients = flood(bed, 8, "x" * 80_000)
        await until_on_loop(lambda: sum(client.answer.status == 429 for client in clients) == 3)
        mine = bed.send(completion(prompt="x" * 8_000, stream=True), key=OTHER)
        await until_on_loop(lambda: bed.gateway.quotas.active("other") == 1)
        for client in (*clients, mine):
            if not client.answer.status:
                await client.hang_up()
        assert bed.gateway.quotas.body_bytes == 0


async def test_a_tenant_whose_quota_is_used_up_holds_little() -> None:
    """Its requests would be refused in the end, but only once their bodies have come."""
    tenant = TenantConfig(1, "acme", "chat", rpm=0, tpm=0, max_concurrency=0)
    quotas = Quotas(QueueBounds(body_bytes=640_000))
    held = Held(quotas, tenant, 0.0)
    held.add(10_000)
    with pytest.raises(ApiError, match="no large body is read"):
        held.add(1)
    Held(quotas, TenantConfig(2, "other", "chat"), 0.0).add(300_000)
    assert quotas.body_bytes == 310_000


@pytest.mark.parametrize(
    "body", [b"{", b'{"model": "nobody", "prompt": [1]}', b'{"model": "demo", "prompt": [1], "priority": -1}']
)
async def test_a_refused_body_is_given_back(body: bytes) -> None:
    async with TestBed(config(Entitlements())) as bed:
        assert (await bed.ask(body)).status in (400, 404)
        assert bed.gateway.quotas.body_bytes == 0


async def test_an_answered_body_is_given_back() -> None:
    async with TestBed(config(Entitlements())) as bed:
        for stream in (True, False):
            assert (await bed.ask(completion(stream=stream))).status == 200
        await settled()
        assert bed.gateway.quotas.body_bytes == 0


async def test_share_of_the_setting_holds_without_an_entitlement() -> None:
    async with TestBed(config(Entitlements())) as bed:
        bed.gateway.quotas.bounds = replace(bed.gateway.quotas.bounds, share=0.1)
        bed.gateway.quotas.most_open = 20
        bed.every(Script(hang_after=0))
        clients = [bed.send(completion(stream=True), key=key) for key in (KEY, OTHER) for _ in range(3)]
        await until_on_loop(lambda: sum(client.answer.status == 429 for client in clients) == 2)
        assert (bed.gateway.quotas.active("acme"), bed.gateway.quotas.active("other")) == (2, 2)
        refused = next(client.answer for client in clients if client.answer.status)
        assert "queue_share 10%" in refused.error["message"]
        for client in clients:
            if not client.answer.status:
                await client.hang_up()
