"""Who may not: people who are not signed in, roles that are too low, forms and sessions that have run out."""

from __future__ import annotations

from collections import Counter

import pytest
from playwright.sync_api import expect

from controller.services.records.refusals import BURST
from tests.browser.conftest import sign_in
from tests.browser.every_page.pages import ACTIONS, PAGES, RANK, SAVED

pytestmark = [pytest.mark.browser, pytest.mark.long(105)]

TOO_LOW = [(role, action) for action in ACTIONS for role in RANK if RANK[role] < RANK[action.role]]


def posted(page, places, action):
    """The answer to what a control would send, with the token of the page that the person is on."""
    token = page.locator('input[name="csrfmiddlewaretoken"]').first.input_value()
    form = {name: value.format_map(places) for name, value in action.data.items()}
    path = action.path.format_map(places)
    return page.request.post(path, form={**form, "csrfmiddlewaretoken": token}, max_redirects=0)


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_what_a_role_may_not_do_is_refused_and_recorded(visit, places, caller, role):
    page = visit(role)
    before = {each["id"] for each in caller.recorded("access_refused", actor=role, limit=200)}
    sent = [action for low, action in TOO_LOW if low == role]
    answers = {action.name: posted(page, places, action) for action in sent}
    assert {name: answer.status for name, answer in answers.items() if answer.status != 403} == {}
    for action in sent:
        assert f"This requires the {action.role} role. Your role is {role}." in answers[action.name].text()
    recorded = [each for each in caller.recorded("access_refused", actor=role, limit=200) if each["id"] not in before]
    told = Counter(each["subject"] for each in recorded)
    assert told <= Counter(action.path.format_map(places) for action in sent)
    assert 0 < told.total() <= BURST  # the audit has as many as a person may fill it with; the metric counts all
    page.goto("/audit/?kind=access_refused")
    expect(page.locator("#audit-rows tr").first).to_contain_text(role)


def test_no_one_does_anything_without_signing_in(visit, places):
    page = visit(None, "/login/")
    for action in ACTIONS:
        answer = posted(page, places, action)
        assert (answer.status, answer.headers["location"][:7]) == (302, "/login/"), action.name


def test_no_one_sees_anything_without_signing_in(visit, places):
    page = visit(None, "/login/")
    for listed in PAGES:
        if listed.status == 200:
            answer = page.request.get(listed.at(places), max_redirects=0)
            assert (answer.status, answer.headers["location"][:12]) == (302, "/login/?next"), listed.name


@pytest.mark.parametrize("name", ["request", "compare", "class-change", "tenant-new"])
def test_who_signs_in_comes_to_the_page_that_was_asked_for(visit, places, stack, name):
    path = next(listed for listed in PAGES if listed.name == name).at(places)
    page = visit(None, path)
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    person, password = stack.person("admin")
    page.get_by_label("Username").fill(person)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", level=1)).not_to_have_text("Sign in")
    assert page.url.removeprefix(stack.console) == path


def test_signing_out_ends_the_session_everywhere(visit, stack):
    page = visit(None, "/login/")
    sign_in(page, *stack.person("viewer"))
    other = page.context.new_page()
    other.goto("/classes/")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    for each in (page, other):
        each.goto("/queue/")
        expect(each.get_by_role("heading", name="Sign in")).to_be_visible()


def test_a_viewer_may_save_what_is_shown(tab, places):
    page = tab("viewer")
    for name, link, suffix in SAVED:
        page.goto(next(listed for listed in PAGES if listed.name == name).at(places))
        with page.expect_download() as saved:
            page.get_by_role("link", name=link, exact=True).click()
        assert saved.value.suggested_filename.endswith(suffix)
        assert saved.value.path().stat().st_size > 100
