"""Sessions: listed, ended, by whom, how long they live, and what is stored of them."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.conf import settings
from django.test import Client
from django.utils import timezone

from console import session_keys, sessions
from console.wording.browser import browser_words
from controller.models import Decision, PersonSession
from controller.services.access.sessions import sessions_clear
from tests import factories
from workers import live
from workers.tasks.records import drop_old_records

pytestmark = pytest.mark.django_db
FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
HOUR = 3600.0


def browser(person, address="192.0.2.1", agent=FIREFOX):
    client = Client(REMOTE_ADDR=address, headers={"user-agent": agent})
    answer = client.post("/login/", {"username": person.username, "password": "secret"})
    assert answer.status_code == 302
    return client


def key_of(client):
    return client.cookies[settings.SESSION_COOKIE_NAME].value


def row_of(client):
    return PersonSession.objects.get(digest=session_keys.digest_of(key_of(client)))


def signed_in(client):
    return client.get("/sessions/").status_code == 200


@pytest.fixture
def told(monkeypatch):
    """The groups whose sockets were closed."""
    groups = []
    monkeypatch.setattr(live, "send_to_group", lambda group, event: groups.append(group))
    return groups


@pytest.fixture
def clock(monkeypatch):
    """Sessions are loaded by the real time, so a test moves what is stored instead of the clock."""

    def later(client, seconds):
        row = row_of(client)
        moved = {name: getattr(row, name) - timedelta(seconds=seconds) for name in ("expire_date", "used_at")}
        PersonSession.objects.filter(pk=row.pk).update(**moved)

    return later


def test_a_session_says_whose_it_is_and_from_where():
    person = factories.user("viewer")
    row = row_of(browser(person, "192.0.2.9"))
    assert (row.person, row.address, row.browser) == (person, "192.0.2.9", FIREFOX)
    assert abs((row.used_at - timezone.now()).total_seconds()) < 60


def test_the_key_of_the_cookie_is_not_stored_and_the_digest_signs_nobody_in():
    client = browser(factories.user("viewer"))
    key, row = key_of(client), row_of(client)
    assert key not in str(vars(row))
    thief = Client()
    thief.cookies[settings.SESSION_COOKIE_NAME] = row.digest[:32]
    assert not signed_in(thief)
    thief.cookies[settings.SESSION_COOKIE_NAME] = row.digest
    assert not signed_in(thief)


def test_people_see_their_own_sessions_and_admins_those_of_all():
    vera, olga = factories.user("viewer", username="vera"), factories.user("admin", username="olga")
    hers, admins = browser(vera), browser(olga)
    assert b"olga" not in hers.get("/sessions/").content
    page = admins.get("/sessions/").content
    assert b"vera" in page
    assert b"Firefox on Linux" in page
    assert page.count(b">this session<") == 1


def test_a_session_is_ended_at_once_with_its_sockets_and_that_is_recorded(told):
    vera, olga = factories.user("viewer"), factories.user("admin")
    hers, admins = browser(vera, "192.0.2.7"), browser(olga)
    digest = row_of(hers).digest
    answer = admins.post("/sessions/end/", {"session": digest}, follow=True)
    assert b"1 session ended." in answer.content
    assert not signed_in(hers)
    assert told == [session_keys.group_of(digest)]
    decision = Decision.objects.get(kind="sessions_ended")
    assert (decision.actor, decision.subject) == (olga.username, vera.username)
    assert (decision.outcome, decision.inputs) == ({"sessions": 1}, {"addresses": ["192.0.2.7"]})
    assert digest not in str(vars(decision))


def test_nobody_ends_a_session_of_somebody_else_without_being_an_admin(told):
    hers, his = browser(factories.user("viewer")), browser(factories.user("operator"))
    answer = hers.post("/sessions/end/", {"session": row_of(his).digest}, follow=True)
    assert b"Nothing to end" in answer.content
    assert signed_in(his)
    assert told == []


def test_a_person_signs_out_everywhere_else(told):
    person = factories.user("viewer")
    here, there, elsewhere = (browser(person) for _ in range(3))
    other = browser(factories.user("viewer"))
    here.post("/sessions/end/", {"session": "others"})
    assert [signed_in(each) for each in (here, there, elsewhere, other)] == [True, False, False, True]
    assert len(told) == 2


def test_without_redis_a_session_ends_all_the_same(monkeypatch):
    def away(group, event):
        raise live.LiveUnavailable("Redis is unavailable: test")

    hers, admins = browser(factories.user("viewer")), browser(factories.user("admin"))
    monkeypatch.setattr(live, "send_to_group", away)
    admins.post("/sessions/end/", {"session": row_of(hers).digest})
    assert not signed_in(hers)


# ---- how long they live ----------------------------------------------------------------------------------------------


def test_a_session_ends_when_it_is_not_used(clock):
    client = browser(factories.user("viewer"))
    lives = (row_of(client).expire_date - timezone.now()).total_seconds()
    assert lives == pytest.approx(settings.SESSION_IDLE_HOURS * HOUR, abs=60)
    clock(client, lives + 1)
    assert not signed_in(client)


def test_use_keeps_a_session_and_is_noted_every_five_minutes(monkeypatch):
    client, now = browser(factories.user("viewer")), time.time()
    first = row_of(client)
    monkeypatch.setattr(sessions.time, "time", lambda: now + 200)
    assert signed_in(client)
    assert row_of(client).used_at == first.used_at
    monkeypatch.setattr(sessions.time, "time", lambda: now + 400)
    assert signed_in(client)
    later = row_of(client)
    assert (later.expire_date - first.expire_date).total_seconds() == pytest.approx(400, abs=5)
    assert later.started_at == first.started_at


def test_a_page_that_refreshes_itself_is_no_use(monkeypatch, live_store):
    client, now = browser(factories.user("viewer")), time.time()
    first = row_of(client)
    monkeypatch.setattr(sessions.time, "time", lambda: now + 4000)
    for path in ("/fleet/live/", "/session/", "/overview/history/"):
        assert client.get(path).status_code in (200, 204)
    assert row_of(client).used_at == first.used_at


def test_no_session_lives_longer_than_a_week_however_much_it_is_used(monkeypatch):
    client, started = browser(factories.user("viewer")), time.time()
    day = 24 * HOUR
    monkeypatch.setattr(sessions.time, "time", lambda: started + 6.9 * day)
    assert signed_in(client)
    lives = row_of(client).expire_date.timestamp() - started
    assert lives == pytest.approx(settings.SESSION_DAYS * day, abs=60)


def test_a_clock_that_steps_back_makes_no_session_longer(monkeypatch):
    client, now = browser(factories.user("viewer")), time.time()
    monkeypatch.setattr(sessions.time, "time", lambda: now - 30 * 24 * HOUR)
    assert signed_in(client)
    assert row_of(client).expire_date.timestamp() < now + settings.SESSION_IDLE_HOURS * HOUR


def test_a_clock_that_steps_back_revives_no_session(monkeypatch):
    client, now = browser(factories.user("viewer")), timezone.now()
    type(row_of(client)).objects.update(expire_date=now - timedelta(hours=1))
    monkeypatch.setattr(timezone, "now", lambda: now - timedelta(days=1))
    assert not signed_in(client)


def test_the_job_clears_what_has_ended(clock):
    old, new = browser(factories.user("viewer")), browser(factories.user("viewer"))
    clock(old, 13 * HOUR)
    drop_old_records()
    assert list(PersonSession.objects.values_list("digest", flat=True)) == [row_of(new).digest]
    assert sessions_clear() == 0


def test_a_changed_password_and_a_removed_person_end_their_sessions():
    person, gone = factories.user("viewer"), factories.user("viewer")
    client, theirs = browser(person), browser(gone)
    person.set_password("another secret of hers")
    person.save()
    gone.delete()
    assert not signed_in(client)
    assert not signed_in(theirs)


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (FIREFOX, "Firefox on Linux"),
        ("Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/140.0 Safari/537.36 Edg/140.0", "Edge on Windows"),
        ("Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) Version/18.0 Safari/604.1", "Safari on iPhone"),
        ("curl/8.5.0", "curl/8.5.0"),
        ("", "unknown"),
    ],
)
def test_a_browser_in_words(agent, words):
    assert browser_words(agent) == words
