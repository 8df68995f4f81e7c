// Queue: the browser holds only the rows in view. Between frames their slack counts down by this browser's clock.

import { question } from "../base.js";
import { capacityWords } from "../capacity.js";
import { DASH, clock, count, ms } from "../format.js";
import { LiveTopic, stateShower } from "../live.js";
import { RowWindow } from "../rows.js";
import { startWords } from "../start.js";

const TICK_MS = 200;
const TYPING_MS = 150;
const find = (selector, root = document) => root.querySelector(selector);
const cell = (row, name) => row.querySelector(`[data-cell="${name}"]`);
const form = find("[data-command]");
const canAct = Boolean(find("[data-act]"));
const view = { offset: 0, limit: 60, key: "", text: "", held: false };
const query = new URLSearchParams(location.search); // a link with a filter, or this page reloaded
view.key = (query.get("key") || "").slice(0, 200);
view.text = (query.get("text") || "").trim().slice(0, 100);
const selected = new Set();
let all = false; // is everything selected that matches the filter, also the rows that this browser does not hold?
let data = null;
let epoch = 0; // seconds to add to this browser's clock to get the console's
let heldAt = null; // the moment that is shown while updates are paused

const now = () => heldAt ?? performance.now() / 1000 + epoch;

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---- classes ------------------------------------------------------------------------------------------------------------

function showClasses() {
  const holder = find("[data-classes]");
  const known = new Map([...holder.children].map((button) => [button.dataset.key, button]));
  for (const item of withFiltered(data.by_class)) {
    let button = known.get(item.key);
    known.delete(item.key);
    if (!button) {
      button = find("#queue-class").content.firstElementChild.cloneNode(true);
      button.dataset.key = item.key;
      button.setAttribute("aria-pressed", String(item.key === view.key));
      button.addEventListener("click", () => filterByClass(item.key));
      holder.append(button);
    }
    put(cell(button, "name"), item.name);
    put(cell(button, "count"), count(item.count));
    put(cell(button, "tenant"), item.tenant);
    const slack = item.due_at === null ? null : item.due_at - now();
    put(cell(button, "slack"), slack === null ? "" : `least slack ${ms(slack)}`);
    cell(button, "slack").classList.toggle("miss", slack !== null && slack < 0);
  }
  for (const button of known.values()) button.remove();
}

/** The class in the filter keeps its button even when none of its requests wait: a click on it clears the filter. */
function withFiltered(classes) {
  if (!view.key || classes.some((item) => item.key === view.key)) return classes;
  const [tenant, name] = [view.key.slice(0, view.key.indexOf("/")), view.key.slice(view.key.indexOf("/") + 1)];
  return [...classes, { key: view.key, tenant, name: name || "no class (defaults)", count: 0, due_at: null }];
}

/** Drops the rows and the selection of the old filter: how many match the new one is unknown until its frame arrives. */
function filterChanged() {
  data = null;
  selectAll(false);
  showSelected();
  const query = new URLSearchParams();
  for (const name of ["key", "text"]) if (view[name]) query.set(name, view[name]);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

function filterByClass(key) {
  view.key = view.key === key ? "" : key;
  filterChanged();
  for (const button of find("[data-classes]").children) button.setAttribute("aria-pressed", String(button.dataset.key === view.key));
  rows.toTop();
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

function make(row) {
  const element = find("#queue-row").content.firstElementChild.cloneNode(true);
  put(cell(element, "id"), row.id);
  cell(element, "id").title = row.id;
  if (canAct) {
    const box = cell(element, "select");
    box.value = row.id;
    box.checked = all || selected.has(row.id);
    box.disabled = all;
    box.setAttribute("aria-label", `Select request ${row.id}`);
  }
  return element;
}

function update(element, row) {
  element.classList.toggle("left", Boolean(row.left));
  cell(element, "left").hidden = !row.left;
  if (row.left) {
    element.row = null;
    for (const name of ["start", "ends"]) put(cell(element, name), "");
    cell(element, "paused").hidden = true;
    if (canAct) cell(element, "select").disabled = true;
    return;
  }
  element.row = row;
  if (canAct) cell(element, "select").disabled = all;
  put(cell(element, "class"), row.slo_class || "no class (defaults)");
  put(cell(element, "tenant"), row.tenant);
  put(cell(element, "model"), row.model);
  put(cell(element, "tokens"), `${count(row.prompt_tokens)} + ${count(row.output_tokens)}`);
  put(cell(element, "ttft"), `of ${ms(row.ttft_s)}`);
  put(cell(element, "priority"), row.priority === null ? DASH : String(row.priority));
  cell(element, "paused").hidden = !row.paused;
  tickRow(element);
}

const rows = new RowWindow(find("[data-scroll]"), find("[data-rows]"), find("[data-head]").children.length, {
  make,
  update,
  ask(offset, limit) {
    Object.assign(view, { offset, limit });
    topic.send({ type: "view", ...view });
  },
});

function show() {
  find("[data-table]").setAttribute("aria-rowcount", String(data.matching + 1));
  rows.show(data.rows, data.offset, data.matching);
  put(find("[data-total]"), count(data.total));
  const filtered = view.key || view.text;
  put(find("[data-shown]"), filtered ? `${count(data.matching)} of ${count(data.total)} waiting` : `${count(data.total)} waiting`);
  showEngines();
  showEmpty(Boolean(filtered));
  showSelected();
}

function showEngines() {
  const { text, unserved } = capacityWords(data.capacity ?? {});
  const holder = find("[data-engines]");
  holder.hidden = !text;
  holder.className = unserved ? "banner lost" : "note near";
  put(holder, text);
}

function showEmpty(filtered) {
  const empty = find("[data-empty]");
  empty.hidden = data.matching > 0;
  const [headline, text] = empty.children;
  headline.classList.toggle("loading", data.gateways === 0);
  if (data.gateways === 0) {
    put(headline, "Waiting for the gateways");
    put(text, "Gateways publish their queues only while this page is open.");
  } else if (data.total > 0 && filtered) {
    put(headline, "No requests match this filter.");
    put(text, "Clear the filter to see all waiting requests.");
  } else {
    put(headline, "The queue is empty.");
    put(text, capacityWords(data.capacity ?? {}).idle);
  }
}

function tickRow(element) {
  const { row } = element;
  const slack = row.due_at - now();
  // The bar of a late request fills again, in red, by how late it is.
  const share = row.ttft_s > 0 ? Math.min(1, Math.abs(slack) / row.ttft_s) : 1;
  put(cell(element, "slack"), slack < 0 ? `${ms(-slack)} late` : `${ms(slack)} left`);
  cell(element, "slack").className = slack < 0 ? "miss" : share < 0.25 ? "near" : "";
  const meter = cell(element, "meter");
  meter.className = `meter ${slack < 0 || row.hopeless ? "bad" : share < 0.25 ? "warn" : "ok"}`;
  meter.firstElementChild.style.width = `${(share * 100).toFixed(1)}%`;
  put(cell(element, "waited"), ms(Math.max(0, now() - row.arrived_at)));
  const { text, ends, late } = startWords(row, now());
  const start = cell(element, "start");
  put(start, text);
  start.classList.toggle("miss", late);
  start.title = row.start_at === null ? "" : `about ${clock(new Date(row.start_at * 1000))}`;
  put(cell(element, "ends"), ends);
}

function tick() {
  for (const element of rows.elements.values()) if (element.row) tickRow(element);
}

// ---- filter, pause updates, select, act ------------------------------------------------------------------------------------------

function showSelected() {
  if (!canAct) return;
  const number = all ? data?.matching ?? 0 : selected.size;
  for (const button of form.querySelectorAll("[data-act]")) button.disabled = number === 0 || Boolean(running);
  const some = selected.size ? `${count(selected.size)} selected` : "None selected";
  put(find("[data-selected]"), all ? `All ${count(number)} matching selected` : some);
  const button = find("[data-all]");
  button.disabled = Boolean(running) || (!all && !data?.matching);
  button.setAttribute("aria-pressed", String(all));
  put(button, all ? "Clear selection" : `Select all ${data ? `${count(data.matching)} ` : ""}matching`);
}

function selectAll(on) {
  if (!canAct || all === on) return;
  all = on;
  clearSelection();
}

function answered(text, ok) {
  const box = find("[data-answer]");
  box.textContent = text;
  box.className = `banner ${ok ? "done" : "lost"}`;
  box.hidden = false;
}

const NOT_ALLOWED = "No requests were changed: your session has ended or lacks permission. Reload the page.";
const NO_ANSWER = "The console did not respond. The command may have taken effect, or may within 5 seconds. Check the queue.";
const isJson = (answer) => (answer.headers.get("content-type") || "").includes("json");

/** For an answer without JSON. After a 5xx of a proxy or of the console it is unknown how much of the command was done. */
const refusal = (answer) => (answer.status >= 500 ? NO_ANSWER : NOT_ALLOWED);

async function act(event) {
  event.preventDefault();
  const kind = event.submitter.value;
  if (all) return actOnAll(kind);
  const body = new FormData(form, event.submitter);
  for (const id of selected) body.append("request", id); // read now: the selection stays open to changes during a question
  if (kind === "cancel") {
    const title = selected.size === 1 ? "Cancel this request?" : `Cancel ${count(selected.size)} requests?`;
    const effect = selected.size === 1 ? "Its client gets an error." : "Their clients get an error.";
    if (!(await question(title, `${effect} This cannot be undone.`, CANCEL))) return undefined;
  }
  try {
    const answer = await fetch(form.action, { method: "POST", body, headers: { accept: "application/json" } });
    const ok = answer.ok && isJson(answer);
    answered(isJson(answer) ? (await answer.json()).message : refusal(answer), ok);
    if (ok) clearSelection();
  } catch {
    answered(NO_ANSWER, false);
  }
  return undefined;
}

// ---- act on all matching -------------------------------------------------------------------------------------------------------

let running = null; // AbortController of a command on all matching
const CANCEL = "Cancel requests"; // the button of the dialog

function filterInWords() {
  const button = view.key && [...find("[data-classes]").children].find((each) => each.dataset.key === view.key);
  const parts = [];
  if (button) parts.push(`in class ${cell(button, "name").textContent} of ${cell(button, "tenant").textContent}`);
  if (view.text) parts.push(`matching "${view.text}"`);
  return parts.length ? ` ${parts.join(", ")}` : "";
}

async function actOnAll(kind) {
  const until = now(); // requests that arrive while the question is open are not included
  const order = [...crypto.getRandomValues(new Uint8Array(16))].map((each) => each.toString(16).padStart(2, "0")).join("");
  const body = new FormData(form);
  const said = { kind, order, key: view.key, text: view.text, until: until.toFixed(3) };
  for (const [name, value] of Object.entries(said)) body.set(name, value);
  const matching = data?.matching ?? 0; // read now: a reconnect while the question is open may clear `data`
  const title = `Cancel all ${count(matching)} waiting requests${filterInWords()}?`;
  const effect = "Their clients get an error. This cannot be undone. Requests that arrive from now on are not affected.";
  // Pause, resume and a priority can be changed back, so only cancelling asks.
  if (kind === "cancel" && !(await question(title, effect, CANCEL))) return;
  running = new AbortController();
  showSelected();
  progress({ told: 0, of: matching });
  let last = null;
  try {
    const answer = await fetch(form.dataset.allAt, { method: "POST", body, signal: running.signal, headers: { accept: "application/json" } });
    if (!isJson(answer) && answer.status >= 500) await reportOutcome(order, last, "The console did not respond.");
    else if (!answer.ok || !isJson(answer)) answered(isJson(answer) ? (await answer.json()).message : NOT_ALLOWED, false);
    else {
      for await (const line of linesOf(answer)) {
        last = line;
        progress(line);
      }
      if (last?.message) answered(last.message, last.ok);
      else await reportOutcome(order, last, "The console stopped responding.");
    }
  } catch (error) {
    await reportOutcome(order, last, error.name === "AbortError" ? "Stopped." : "The console did not respond.");
  }
  running = null;
  find("[data-progress]").hidden = true;
  find("[data-stop]").disabled = false;
  if (last?.ok) selectAll(false);
  showSelected();
}

const RECORDED_WITHIN_MS = 8000; // the gateways first answer the batch that was being sent
const LOOK_EVERY_MS = 250;

/** After a command whose answer broke off: waits for its audit record, which includes the batch being sent just then. */
async function reportOutcome(order, last, why) {
  find("[data-stop]").disabled = true;
  put(find("[data-progress-text]"), `${why} Waiting for the last batch…`);
  const until = performance.now() + RECORDED_WITHIN_MS;
  while (performance.now() < until) {
    const came = await recordOf(order);
    if (came?.known) return answered(came.message, came.ok);
    await new Promise((resume) => setTimeout(resume, LOOK_EVERY_MS));
  }
  return answered(`${why} ${soFar(last)} Check the audit for the final result.`, false);
}

async function recordOf(order) {
  try {
    const answer = await fetch(`${form.dataset.allAt}${order}/`, { headers: { accept: "application/json" }, signal: AbortSignal.timeout(2000) });
    return answer.ok && isJson(answer) ? await answer.json() : null;
  } catch {
    return null; // the console is unreachable: the caller asks again
  }
}

const soFar = (line) => (line ? `${count(line.told)} of ${count(line.of)} were processed, ${count(line.applied)} of them applied.` : "The result is unknown.");

function progress(line) {
  const share = line.of ? line.told / line.of : 1;
  const meter = find("[data-progress] .meter");
  find("[data-progress]").hidden = false;
  meter.firstElementChild.style.width = `${(share * 100).toFixed(1)}%`;
  meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
  put(find("[data-progress-text]"), `${count(line.told)} of ${count(line.of)} processed`);
}

/** The lines of a streamed answer, each a JSON value. */
async function* linesOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

if (canAct) {
  find("[data-all]").addEventListener("click", () => selectAll(!all));
  find("[data-stop]").addEventListener("click", () => running?.abort());
}

function clearSelection() {
  selected.clear();
  for (const input of form.querySelectorAll('[data-cell="select"]')) {
    input.checked = all;
    input.disabled = all || !input.closest("tr").row;
  }
  showSelected();
}

let typing = 0;
find("[data-filter]").value = view.text;
find("[data-filter]").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    view.text = event.target.value.trim();
    filterChanged();
    rows.toTop();
  }, TYPING_MS);
});
find("[data-freeze]").addEventListener("click", (event) => {
  view.held = !view.held;
  heldAt = null;
  if (view.held) heldAt = now();
  event.target.setAttribute("aria-pressed", String(view.held));
  put(event.target, view.held ? "Resume updates" : "Pause updates");
  find("[data-table]").setAttribute("aria-busy", "true"); // until the rows of this moment have arrived
  topic.send({ type: "view", ...view });
});
form.addEventListener("change", (event) => {
  if (event.target.dataset.cell !== "select") return;
  if (event.target.checked) selected.add(event.target.value);
  else selected.delete(event.target.value);
  showSelected();
});
form.addEventListener("submit", act);
setInterval(() => document.hidden || view.held || tick(), TICK_MS);

const topic = new LiveTopic("queue", {
  open: () => topic.send({ type: "view", ...view }),
  data(news, frame) {
    epoch = frame.at - performance.now() / 1000;
    if (["held", "key", "text"].some((name) => news[name] !== view[name])) return; // made for an earlier view
    find("[data-table]").removeAttribute("aria-busy");
    data = news;
    showClasses();
    show();
  },
  state: stateShower(find("[data-live-state]"), find("[data-banner]")),
});
