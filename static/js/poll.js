// Parts of a page that are fetched again every few seconds (console/live/polled.py): not while the tab is hidden or a
// confirmation is open, with backoff while the console is unavailable, and always with the age of the data on screen.

import { fillMeters } from "./base.js";
import { localTimes, ms } from "./format.js";
import { liveText, staleText } from "./live.js";
import { morph } from "./morph.js";
import { ENDED, isEnded } from "./session.js";

const EVERY_MS = 3000;
const TIMEOUT_MS = 10_000; // of one request
const PAUSE_MAX_MS = 15_000;
// During a rolling upgrade one console may not know a page that another one serves: a single 404 proves nothing.
const GONE_AFTER = 4; // 404s in a row: half a minute
const GONE_PAUSE_MS = 60_000;
const CHARTS_EVERY = 5; // rounds: charts of an hour hardly change within seconds
const isJson = (answer) => (answer.headers.get("content-type") || "").includes("json");
const jitter = (pause) => pause * (0.9 + Math.random() / 5); // so that pages opened together do not poll together

export class PolledParts {
  /** `first`: age and limit of the first paint (AsOf.as_json); `on`: state(state, text, age) as in live.js, charts(specs). */
  constructor(url, first, on) {
    Object.assign(this, { url, on, pause: EVERY_MS, round: 0, unknown: 0, lost: "", ended: false });
    this.heard(first);
    this.tick();
    setInterval(() => document.hidden || this.tick(), 1000);
    document.addEventListener("visibilitychange", () => this.looked());
    window.addEventListener("online", () => this.soon(0));
    window.addEventListener("pageshow", (event) => event.persisted && this.soon(0));
    window.addEventListener("pagehide", () => this.asking?.abort());
    this.soon(jitter(EVERY_MS));
  }

  looked() {
    if (document.hidden) return clearTimeout(this.timer);
    this.tick(); // shows the current age until the answer arrives
    return this.soon(0);
  }

  soon(pause) {
    clearTimeout(this.timer);
    if (!this.ended && !document.hidden) this.timer = setTimeout(() => this.ask(), pause);
  }

  async ask() {
    if (this.asking) return;
    this.asking = new AbortController();
    const timeout = setTimeout(() => this.asking.abort(), TIMEOUT_MS);
    try {
      await this.take(await this.get());
    } catch {
      this.fail("Cannot reach the console. Retrying…");
    }
    clearTimeout(timeout);
    this.asking = null;
    this.tick();
    this.soon(jitter(this.pause));
  }

  get() {
    const more = this.url.includes("?") ? "&" : "?";
    const charts = this.round++ % CHARTS_EVERY === CHARTS_EVERY - 1 ? `${more}charts=1` : "";
    const head = { accept: "application/json" };
    return fetch(`${this.url}${charts}`, { headers: head, redirect: "manual", signal: this.asking.signal });
  }

  async take(answer) {
    if (isEnded(answer) || answer.status === 403) return this.end(ENDED);
    if (answer.status === 404) return this.notKnown();
    this.unknown = 0;
    if (!isJson(answer)) return this.fail(`The console answered with an error (${answer.status}). Retrying…`);
    const said = await answer.json();
    if (!answer.ok) return this.fail(said.message || "The console answered with an error. Retrying…");
    if (document.querySelector("dialog[open]")) return undefined; // the page must not change under an open confirmation
    this.heard(said);
    this.lost = "";
    this.pause = EVERY_MS;
    this.show(said);
    return undefined;
  }

  heard(said) {
    this.said = said;
    this.at = Date.now(); // not performance.now(), which stops while the machine sleeps
  }

  fail(text) {
    this.lost = text;
    this.pause = Math.min(this.pause * 2, PAUSE_MAX_MS);
  }

  /** A deleted item stays on screen in its last state; should it come back, updates resume. */
  notKnown() {
    this.unknown += 1;
    if (this.unknown < GONE_AFTER) return this.fail("Not found. Retrying…");
    this.fail("This no longer exists. You see its last known state; the console checks again once a minute.");
    this.pause = GONE_PAUSE_MS;
    return undefined;
  }

  end(text) {
    this.lost = text;
    this.ended = true;
  }

  show(said) {
    const box = document.createElement("template");
    box.innerHTML = said.html; // safe: rendered by our own template, which escapes every value
    localTimes(box.content);
    for (const part of box.content.querySelectorAll("[data-part]")) {
      const old = document.querySelector(`[data-part="${part.dataset.part}"]`);
      if (!old) continue;
      morph(old, part);
      fillMeters(old);
    }
    document.dispatchEvent(new Event("parts:shown"));
    if (said.charts) this.on.charts(said.charts);
  }

  tick() {
    const since = (Date.now() - this.at) / 1000;
    const { age_s: known, stale_after_s: limit, reason } = this.said;
    const age = known === null ? null : known + since;
    for (const element of document.querySelectorAll("[data-age]")) {
      const text = ms(Number(element.dataset.age) + (age ?? since));
      if (element.textContent !== text) element.textContent = text;
    }
    if (this.lost) this.on.state("lost", this.lost, `Last update ${ms(age ?? since)} ago.`);
    else if (age === null) this.on.state("stale", reason);
    else if (reason) this.on.state("stale", age > limit ? staleText(reason, age) : reason);
    else if (age > limit + (2 * EVERY_MS) / 1000) this.on.state("stale", staleText("", age));
    else this.on.state("live", liveText(age));
  }
}
