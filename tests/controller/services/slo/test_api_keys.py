"""Keys: shown once, stored hashed, revoked for good."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.models import ApiKey, Decision
from controller.models.tenants import secret_digest
from controller.selectors.snapshot import config_version, gateway_snapshot
from controller.services.slo.api_keys import api_key_revoke, api_keys_used
from tests import factories
from tests.factories import ACTOR

pytestmark = pytest.mark.django_db


def test_the_secret_is_nowhere_in_the_database():
    new = factories.api_key()

    stored = ApiKey.objects.get()
    assert new.secret.startswith("sk-")
    assert len(new.secret) >= 3 + 43  # 32 random bytes
    assert stored.sha256 == secret_digest(new.secret)
    assert new.secret.startswith(stored.prefix)
    assert new.secret not in str(list(ApiKey.objects.values())) + str(list(Decision.objects.values()))
    assert stored.sha256 not in str(list(Decision.objects.values()))


def test_a_revoked_key_leaves_the_snapshot_and_stays_revoked():
    new = factories.api_key()
    before = config_version()
    assert [key.sha256 for key in gateway_snapshot().keys] == [new.key.sha256]

    revoked = api_key_revoke(actor=ACTOR, key_id=new.key.pk)
    again = api_key_revoke(actor=ACTOR, key_id=new.key.pk)

    assert gateway_snapshot().keys == ()
    assert config_version() == before + 1
    assert again.revoked_at == revoked.revoked_at
    assert Decision.objects.filter(kind="api_key_revoked").count() == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"scopes": []}, "scopes"),
        ({"scopes": ["root"]}, "scopes"),
        ({"expires_at": timezone.now() - timedelta(seconds=1)}, "expires_at"),
        ({"name": ""}, "name"),
    ],
)
def test_a_wrong_key_names_its_field(fields, field):
    with pytest.raises(ValidationError) as caught:
        factories.api_key(**fields)

    assert list(caught.value.message_dict) == [field]


def test_keys_of_a_suspended_tenant_and_expired_ones_do_not_serve():
    factories.api_key(factories.tenant(state="suspended"))
    expiring = factories.api_key(expires_at=timezone.now() + timedelta(hours=1))
    ApiKey.objects.filter(pk=expiring.key.pk).update(expires_at=timezone.now())

    assert gateway_snapshot().keys == ()


def test_the_last_use_only_moves_on():
    key = factories.api_key().key
    now = timezone.now()

    assert api_keys_used(key_ids=[key.pk], at=now) == 1
    assert api_keys_used(key_ids=[key.pk], at=now - timedelta(minutes=1)) == 0

    key.refresh_from_db()
    assert key.last_used_at == now
