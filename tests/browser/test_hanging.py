"""A browser test that hangs fails at its limit (`tests/limits.py`), and later ones can use the same browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.running.stack import ROOT

pytestmark = pytest.mark.browser
TESTS = """
import pytest
from playwright.sync_api import sync_playwright
from tests.browser.running.stack import chromium

@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        made = chromium(playwright)
        yield made
        made.close()

def shown(browser):
    page = browser.new_page()
    page.set_content("<p>shown</p>")
    assert page.locator("p").inner_text() == "shown"
    return page

@pytest.mark.timeout(120)
def test_before(browser):
    shown(browser)

@pytest.mark.timeout(5)
def test_hangs(browser):
    page = shown(browser)
    here_it_hangs = page.wait_for_timeout(300_000)

@pytest.mark.timeout(60)
def test_after(browser):
    shown(browser)
"""


def test_the_tests_after_one_that_hangs_use_the_same_browser(tmp_path: Path) -> None:
    (tmp_path / "test_pages.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.limits", "-p", "no:django", "-p", "no:cacheprovider"]
    command += ["-n", "0", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "It took longer than its limit of 5 s" in done.stdout
    assert "here_it_hangs = " in done.stdout
