"""The flow policy, switched on and off in the console: the transfer daemon of `make up` follows."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

pytestmark = pytest.mark.browser


def test_an_operator_switches_it_on_and_back(visit):
    page = visit("operator", "/flows/")
    part = page.locator("[data-part=flows]")
    expect(part).to_contain_text("The flow policy is off")
    expect(part.get_by_role("heading", name=re.compile("off$"))).to_be_visible()
    part.get_by_role("link", name="Choose a flow policy").click()
    page.get_by_label("Flow policy").select_option("mfs")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".banner.done")).to_contain_text("Flow settings updated")
    expect(part).to_contain_text("MFS: promoted near the deadline.")
    expect(part.get_by_role("heading", name=re.compile("scheduling$"))).to_be_visible()
    page.get_by_role("link", name=re.compile("^History of the flow settings")).click()
    page.get_by_role("link", name=re.compile("^Revert")).first.click()
    expect(page.get_by_label("Flow policy")).to_have_value("off")
    page.get_by_role("button", name="Save").click()
    expect(part).to_contain_text("The flow policy is off")
    expect(part.get_by_role("heading", name=re.compile("off$"))).to_be_visible()
