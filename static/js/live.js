// One live topic over a WebSocket: snapshot, merged updates, heartbeat. It reconnects with backoff, asks for a new
// snapshot when a sequence number is missing, and always reports the age of the data on screen.

import { ms } from "./format.js";
import { ENDED, hasEnded } from "./session.js";

const TOO_MANY = "Too many pages are open in this session. Close some of them.";
const SILENCE_MS = 6000; // three heartbeats
const PAUSE_MAX_MS = 15000;

export const liveText = (age) => `Live, updated ${ms(age)} ago`;
/** `reason`: why the data is stale, where that is known. */
export const staleText = (reason, age) => (reason ? `${reason}. Last update ${ms(age)} ago` : `Stale: last update ${ms(age)} ago`);

export class LiveTopic {
  /** `on`: data(data, frame); state(state, text) with state live, stale, lost or connecting; open() is optional. */
  constructor(topic, on) {
    this.topic = topic;
    this.on = on;
    this.pause = 500;
    this.seq = 0;
    this.heard = performance.now();
    this.timer = setInterval(() => this.checkSilence(), 1000);
    window.addEventListener("online", () => this.retryNow());
    document.addEventListener("visibilitychange", () => document.hidden || this.retryNow());
    window.addEventListener("pagehide", () => this.stop());
    window.addEventListener("pageshow", (event) => event.persisted && location.reload());
    this.connect();
  }

  connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    this.socket = new WebSocket(`${scheme}://${location.host}/ws/${this.topic}`);
    this.heard = performance.now();
    this.opened = false;
    this.socket.onmessage = (event) => this.receive(JSON.parse(event.data));
    this.socket.onopen = () => {
      this.opened = true;
      this.on.open?.();
    };
    this.socket.onclose = (event) => this.closed(event);
  }

  receive(frame) {
    this.heard = performance.now();
    this.pause = 500;
    if (frame.type === "heartbeat") return this.showState(frame);
    if (frame.type === "snapshot") this.seq = frame.seq;
    else if (frame.seq !== this.seq + 1) return this.refetch();
    this.seq = frame.seq;
    this.on.data(frame.data, frame);
    return this.showState(frame);
  }

  refetch() {
    this.send({ type: "refetch" });
  }

  /** Sends a message to the console. Without a connection it is dropped: `on.open` sends the current view again. */
  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  showState(frame) {
    if (frame.age_s === null) this.on.state("stale", frame.reason || "No live data yet");
    else if (frame.stale) this.on.state("stale", staleText(frame.reason, frame.age_s));
    else this.on.state("live", liveText(frame.age_s));
  }

  closed(event) {
    if (this.stopped) return;
    if (event.code === 4403) return this.end();
    const tooMany = event.code === 4429;
    if (tooMany) this.pause = PAUSE_MAX_MS; // the handshake succeeded, so this would be the shortest one
    this.on.state("lost", tooMany ? TOO_MANY : "Connection lost. Reconnecting…");
    // A browser does not tell a script why a handshake failed: ask the console whether the session has ended.
    if (!this.opened) hasEnded().then((ended) => ended && this.end());
    this.retry = setTimeout(() => this.connect(), this.pause * (0.75 + Math.random() / 2));
    this.pause = Math.min(this.pause * 2, PAUSE_MAX_MS);
    return undefined;
  }

  end() {
    this.stop();
    this.on.state("lost", ENDED);
  }

  retryNow() {
    if (this.stopped || this.socket.readyState < WebSocket.CLOSING || !this.retry) return;
    clearTimeout(this.retry);
    this.retry = null;
    this.connect();
  }

  checkSilence() {
    if (this.stopped || this.socket.readyState !== WebSocket.OPEN) return;
    if (performance.now() - this.heard > SILENCE_MS) {
      this.on.state("lost", "The console stopped responding. Reconnecting…");
      this.socket.close();
    }
  }

  stop() {
    this.stopped = true;
    clearInterval(this.timer);
    clearTimeout(this.retry);
    // A socket that is still connecting ends with its page; closing it here would log a warning in the browser.
    if (this.socket.readyState === WebSocket.OPEN) this.socket.close();
  }
}

/**
 * Shows a topic's state in the page's indicator and, when it is stale or lost, in the banner above the content. `age`: a
 * sentence with the age of the data, for a state whose text does not contain it.
 */
export function stateShower(indicator, banner) {
  let shown = "";
  return (state, text, age = "") => {
    indicator.dataset.state = state;
    indicator.textContent = text;
    const bad = state === "stale" || state === "lost";
    banner.hidden = !bad;
    banner.className = `banner ${state}`;
    // The age changes every second: screen readers are told of a change of state only.
    const message = state === "lost" ? text : "This data is stale.";
    if (bad && message !== shown) banner.querySelector("[data-banner-text]").textContent = message;
    banner.querySelector("[data-banner-age]").textContent = state === "stale" ? text : age;
    shown = bad ? message : "";
  };
}
