// Parts of a page that are fetched again every few seconds (console/live/polled.py): not while the tab is hidden or somebody
// answers a question, with growing pauses while the console is away, and always saying how old what is on the screen is.

import { fillMeters } from "./base.js";
import { localTimes, ms } from "./format.js";
import { morph } from "./morph.js";
import { ENDED, isEnded } from "./session.js";

const EVERY_MS = 3000;
const PATIENCE_MS = 10_000; // for an answer
const PAUSE_MAX_MS = 15_000;
// While a new release is put in place one console may not know what another shows: one answer of it proves nothing.
const GONE_AFTER = 4; // times in a row that it is not known: half a minute
const GONE_PAUSE_MS = 60_000;
const CHARTS_EVERY = 5; // rounds: measurements of an hour do not move within seconds
const isJson = (answer) => (answer.headers.get("content-type") || "").includes("json");
const jitter = (pause) => pause * (0.9 + Math.random() / 5); // a hundred pages opened at once do not ask at once

export class PolledParts {
  /** `said`: what the first paint says of its age; `on`: state(state, text, age) as of live.js, charts(specs). */
  constructor(url, said, on) {
    Object.assign(this, { url, on, pause: EVERY_MS, round: 0, unknown: 0, lost: "", ended: false });
    this.heard(said);
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
    this.tick(); // as old as it has become meanwhile, until the answer is here
    return this.soon(0);
  }

  soon(pause) {
    clearTimeout(this.timer);
    if (!this.ended && !document.hidden) this.timer = setTimeout(() => this.ask(), pause);
  }

  async ask() {
    if (this.asking) return;
    this.asking = new AbortController();
    const patience = setTimeout(() => this.asking.abort(), PATIENCE_MS);
    try {
      await this.take(await this.get());
    } catch {
      this.fail("The console cannot be reached, trying again");
    }
    clearTimeout(patience);
    this.asking = null;
    this.tick();
    this.soon(jitter(this.pause));
  }

  get() {
    const charts = this.round++ % CHARTS_EVERY === CHARTS_EVERY - 1 ? "?charts=1" : "";
    const head = { accept: "application/json" };
    return fetch(`${this.url}${charts}`, { headers: head, redirect: "manual", signal: this.asking.signal });
  }

  async take(answer) {
    if (isEnded(answer) || answer.status === 403) return this.end(ENDED);
    if (answer.status === 404) return this.notKnown();
    this.unknown = 0;
    if (!isJson(answer)) return this.fail(`The console cannot say it now (${answer.status}), trying again`);
    const said = await answer.json();
    if (!answer.ok) return this.fail(said.message || "The console cannot say it now");
    if (document.querySelector("dialog[open]")) return undefined; // who is asked about something goes on seeing it
    this.heard(said);
    this.lost = "";
    this.pause = EVERY_MS;
    this.show(said);
    return undefined;
  }

  heard(said) {
    this.said = said;
    this.at = Date.now(); // not performance.now(): a machine that slept has old figures on its screen
  }

  fail(text) {
    this.lost = text;
    this.pause = Math.min(this.pause * 2, PAUSE_MAX_MS);
  }

  /** What was deleted stays on the screen as it was last; should it be there again, it moves again. */
  notKnown() {
    this.unknown += 1;
    if (this.unknown < GONE_AFTER) return this.fail("The console does not know this page just now, trying again");
    this.fail("This is gone: what you see is how it was last. It is looked for once a minute.");
    this.pause = GONE_PAUSE_MS;
    return undefined;
  }

  end(text) {
    this.lost = text;
    this.ended = true;
  }

  show(said) {
    const box = document.createElement("template");
    box.innerHTML = said.html; // our own template, everything in it escaped
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
    if (this.lost) this.on.state("lost", this.lost, `What you see is ${ms(age ?? since)} old.`);
    else if (age === null) this.on.state("stale", reason);
    else if (reason) this.on.state("stale", age > limit ? `${reason}: ${ms(age)} old` : reason);
    else if (age > limit + (2 * EVERY_MS) / 1000) this.on.state("stale", `Data is old: ${ms(age)} old`);
    else this.on.state("live", `Live, ${ms(age)} old`);
  }
}
