"""`make bench-console`: server time and queries of every page over a large database, and the delay from event to
browser.

Pages: in this process, over its own PostgreSQL with 1,000,000 request records, 100,000 decisions and 200 instances;
`server_ms` is the first request after a start. Live: `make up` on ports of its own under a steady 200 requests/s, with
99 WebSocket clients and one Chromium, measured up to the DOM. Queue: the cost of 10,000 queued requests while somebody
watches them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from playwright.async_api import Page, async_playwright

from benchmarks.console import live
from benchmarks.console.pages import measure
from benchmarks.console.queue import queue_costs
from benchmarks.console.stack import Running, started
from benchmarks.load.scoring import percentile
from benchmarks.load.trials import note
from benchmarks.servers.engines import stop_on_sigterm

RECORDS, DECISIONS, INSTANCES = 1_000_000, 100_000, 200
SOCKETS = 99
RATE = 200.0
BASE_S = 20.0  # seconds of load without a dashboard, as the baseline of the gateway's CPU time
PROBES = 80  # shorter than the minute over which the page counts
CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
# Notes when the probe class's row first shows each count; the row may come later than the page.
OBSERVE = """() => {
  window.shown = {};
  const look = () => {
    const rows = [...document.querySelectorAll("[data-classes] tr")];
    const row = rows.find((each) => each.dataset.key?.endsWith("/probe"));
    const count = Number(row?.querySelector('[data-cell="now-count"]').textContent.replace(/[^0-9]/g, "") || 0);
    for (let n = Object.keys(window.shown).length + 1; n <= count; n++) window.shown[n] = Date.now() / 1000;
  };
  const parts = { subtree: true, childList: true, characterData: true };
  new MutationObserver(look).observe(document.querySelector("[data-classes]"), parts);
  look();
}"""


async def event_to_browser(stack: Running, rate: float, sockets: int) -> dict[str, Any]:
    keyed = {"Authorization": f"Bearer {stack.api_key}"}
    pid = stack.pid("gateway")
    note(f"{rate:g} requests/s for {BASE_S:g} s with no dashboard")
    alone = await gateway_cpu(stack, keyed, pid, rate, BASE_S)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page(base_url=stack.console)
        await sign_in(page, *stack.person("viewer"))
        cookies = await page.context.cookies()
        cookie = "; ".join(f"{each['name']}={each['value']}" for each in cookies)
        watchers, tasks, session = await live.dashboards(stack.console, cookie, sockets)
        await page.evaluate(OBSERVE)
        note(f"{sockets} sockets and one Chromium, {PROBES} probes")
        seconds = PROBES * live.PROBE_EVERY_S
        console_before, started_at = live.cpu_s(stack.pid("console")), time.monotonic()
        busy = asyncio.create_task(gateway_cpu(stack, keyed, pid, rate, seconds))
        ended = await live.probes(stack.gateway, keyed, stack.body, PROBES)
        watched = await busy
        console_cpu = (live.cpu_s(stack.pid("console")) - console_before) / (time.monotonic() - started_at)
        await asyncio.sleep(live.LATE_S / 2)
        shown = {int(number): at for number, at in (await page.evaluate("window.shown")).items()}
        broken = sum(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await session.close()
        await browser.close()
    sockets_s = [delay for watcher in watchers for delay in live.delays(ended, watcher.seen)]
    dom_s = live.delays(ended, shown)
    frames = sum(watcher.frames for watcher in watchers) / len(watchers) / seconds
    return {
        "event_p95_ms": round(1e3 * percentile(dom_s, 0.95)),
        "event_p50_ms": round(1e3 * percentile(dom_s, 0.5)),
        "socket_p95_ms": round(1e3 * percentile(sockets_s, 0.95)),
        "socket_p50_ms": round(1e3 * percentile(sockets_s, 0.5)),
        "dashboards_lost": broken,
        "frames_per_s": round(frames, 2),
        "frame_kb": round(sum(w.bytes for w in watchers) / max(1, sum(w.frames for w in watchers)) / 1024, 1),
        "gateway_cost_pct": round(100 * (watched["cpu"] - alone["cpu"]), 2),
        "gateway_cpu_pct": [round(100 * alone["cpu"], 1), round(100 * watched["cpu"], 1)],
        "console_cpu_pct": round(100 * console_cpu, 1),
        "answered": [alone["answered"], watched["answered"]],
    }


async def gateway_cpu(
    stack: Running, headers: Mapping[str, str], pid: int, rate: float, seconds: float
) -> dict[str, float]:
    """Share of one core that the gateway used while it served `rate`, and the share of requests answered with 200."""
    before, started_at = live.cpu_s(pid), time.monotonic()
    ok = await live.load(stack.gateway, headers, stack.body, rate, seconds)
    taken = time.monotonic() - started_at
    return {"cpu": (live.cpu_s(pid) - before) / taken, "answered": round(ok / int(rate * seconds), 4)}


async def sign_in(page: Page, name: str, password: str) -> None:
    await page.goto("/login/?next=/")
    await page.get_by_label("User name").fill(name)
    await page.get_by_label("Password").fill(password)
    await page.get_by_role("button", name="Sign in").click()
    await page.wait_for_url("**/")
    await page.wait_for_selector('[data-live-state][data-state="live"]', timeout=20_000)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_console", description="Pages and live updates.")
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--decisions", type=int, default=DECISIONS)
    parser.add_argument("--instances", type=int, default=INSTANCES)
    parser.add_argument("--sockets", type=int, default=SOCKETS)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument(
        "--only", choices=("pages", "live", "queue"), help="one part; the others are left out of the JSON"
    )
    arguments = parser.parse_args()
    stop_on_sigterm()
    result: dict[str, Any] = {}
    if arguments.only in (None, "queue"):
        result["queue"] = queue_costs()
    if arguments.only in (None, "live"):
        with started() as stack:
            result |= asyncio.run(event_to_browser(stack, arguments.rate, arguments.sockets))
    if arguments.only in (None, "pages"):
        pages, previews = measure(arguments.records, arguments.decisions, arguments.instances)
        print(table(pages))
        result["server_ms"] = {name: row["cold_ms"] for name, row in pages.items()}
        result["warm_ms"] = {name: row["warm_ms"] for name, row in pages.items()}
        result["queries"] = {name: row["queries"] for name, row in pages.items()}
        result["preview_s"] = previews
        result["largest"] = {"server_ms": max(result["server_ms"].values()), "queries": max(result["queries"].values())}
    print(json.dumps(result))
    return 0


def table(pages: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'page':<30} {'cold':>9} {'warm':>9} {'queries':>8} {'size':>8}"]
    for name, row in pages.items():
        lines.append(
            f"{name:<30} {row['cold_ms']:>6.0f} ms {row['warm_ms']:>6.0f} ms {row['queries']:>8} {row['kb']:>5} kB"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
