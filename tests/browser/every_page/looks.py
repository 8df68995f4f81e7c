"""What is looked at on every page: what axe-core says of it, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from playwright.sync_api import Page
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

AXE = Path(__file__).parents[1] / "vendor" / "axe.min.js"
OF_COLOURS = ["color-contrast", "link-in-text-block"]  # what the other scheme can change
SERIOUS = """async (rules) => {
  const only = rules.length ? { runOnly: { type: "rule", values: rules } } : {};
  const found = await axe.run(document, { resultTypes: ["violations"], ...only });
  return found.violations.filter((each) => ["serious", "critical"].includes(each.impact))
    .map((each) => `${each.id}: ${each.nodes.map((node) => node.target.join(" ")).join(", ")}`);
}"""


@cache
def _axe() -> str:
    return AXE.read_text()


def serious_findings(page: Page, rules: Sequence[str] = ()) -> list[str]:
    """axe-core, evaluated by the debugger: the page's own policy lets no foreign script in. `rules`: these alone."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_axe())
    found: list[str] = page.evaluate(SERIOUS, list(rules))
    return found


# A change of colours may be on its way for a moment; what moves forever is not waited for.
SETTLED = """async () => {
  await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
  const ending = document.getAnimations().filter((each) => Number.isFinite(each.effect.getComputedTiming().endTime));
  await Promise.allSettled(ending.map((each) => each.finished));
}"""


def findings_in_both_schemes(page: Page, scheme: str) -> list[str]:
    """`serious_findings` in the scheme the page is shown in, and in the other one when its reader changes over."""
    other = "dark" if scheme == "light" else "light"
    found = []
    for shown, rules in ((other, OF_COLOURS), (scheme, ())):  # as it was, in the end
        page.emulate_media(color_scheme=shown)  # type: ignore[arg-type]
        page.evaluate(SETTLED)
        found += [f"{shown}: {each}" for each in serious_findings(page, rules)]
    return found


def beyond(page: Page, width: int) -> int:
    """Pixels by which the page is wider than the screen."""
    return max(0, int(page.evaluate("document.documentElement.scrollWidth")) - width)


def settle(page: Page) -> None:
    """Wait until the page has loaded and is idle, for 5 s at most: a page that updates itself goes on asking."""
    page.wait_for_load_state("load")
    with suppress(PlaywrightTimeoutError):
        page.wait_for_load_state("networkidle", timeout=5_000)
