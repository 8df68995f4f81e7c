// Queue: the browser holds the rows in view only. Their slack runs down between frames by the clock of this browser.

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
const asked = new URLSearchParams(location.search); // a link from elsewhere, or this page loaded again
view.key = (asked.get("key") || "").slice(0, 200);
view.text = (asked.get("text") || "").trim().slice(0, 100);
const selected = new Set();
let all = false; // everything that matches the filter, whatever the browser holds of it
let data = null;
let epoch = 0; // what to add to this browser's clock, in seconds, to have the console's
let heldAt = null; // the moment that is shown while the picture is held

const now = () => heldAt ?? performance.now() / 1000 + epoch;

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---- classes ------------------------------------------------------------------------------------------------------------

function showClasses() {
  const holder = find("[data-classes]");
  const known = new Map([...holder.children].map((button) => [button.dataset.key, button]));
  for (const item of withChosen(data.by_class)) {
    let button = known.get(item.key);
    known.delete(item.key);
    if (!button) {
      button = find("#queue-class").content.firstElementChild.cloneNode(true);
      button.dataset.key = item.key;
      button.setAttribute("aria-pressed", String(item.key === view.key));
      button.addEventListener("click", () => choose(item.key));
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

/** The class that is shown alone has its button though nothing of it waits: it is the way back. */
function withChosen(classes) {
  if (!view.key || classes.some((item) => item.key === view.key)) return classes;
  const [tenant, name] = [view.key.slice(0, view.key.indexOf("/")), view.key.slice(view.key.indexOf("/") + 1)];
  return [...classes, { key: view.key, tenant, name: name || "no class (defaults)", count: 0, due_at: null }];
}

/** Another filter: nothing of what is known answers it, least of all how many match. */
function filterChanged() {
  data = null;
  chooseAll(false);
  showSelected();
  const query = new URLSearchParams();
  for (const name of ["key", "text"]) if (view[name]) query.set(name, view[name]);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

function choose(key) {
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
  const { text, nobody } = capacityWords(data.capacity ?? {});
  const holder = find("[data-engines]");
  holder.hidden = !text;
  holder.className = nobody ? "banner lost" : "note near";
  put(holder, text);
}

function showEmpty(filtered) {
  const empty = find("[data-empty]");
  empty.hidden = data.matching > 0;
  const [headline, text] = empty.children;
  headline.classList.toggle("loading", data.gateways === 0);
  if (data.gateways === 0) {
    put(headline, "No gateway has published its queue yet");
    put(text, "Gateways publish it only while somebody looks at this page.");
  } else if (data.total > 0 && filtered) {
    put(headline, "Nothing matches the filter.");
    put(text, "Clear it to see the rest.");
  } else {
    put(headline, "Nothing is waiting.");
    put(text, capacityWords(data.capacity ?? {}).idle);
  }
}

function tickRow(element) {
  const { row } = element;
  const slack = row.due_at - now();
  // What is late fills its bar again, in red, by how late it is.
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

// ---- filter, hold, select, act ------------------------------------------------------------------------------------------

function showSelected() {
  if (!canAct) return;
  const chosen = all ? data?.matching ?? 0 : selected.size;
  for (const button of form.querySelectorAll("[data-act]")) button.disabled = chosen === 0 || Boolean(telling);
  const some = selected.size ? `${count(selected.size)} selected` : "None selected";
  put(find("[data-selected]"), all ? `All ${count(chosen)} that match` : some);
  const button = find("[data-all]");
  button.disabled = Boolean(telling) || (!all && !data?.matching);
  button.setAttribute("aria-pressed", String(all));
  put(button, all ? "Choose single ones" : `Choose all ${data ? count(data.matching) : ""} that match`);
}

function chooseAll(wanted) {
  if (!canAct || all === wanted) return;
  all = wanted;
  clearSelection();
}

function answered(text, ok) {
  const box = find("[data-answer]");
  box.textContent = text;
  box.className = `banner ${ok ? "done" : "lost"}`;
  box.hidden = false;
}

const NOBODY = "Nothing was done: your session has ended or may not do this. Load the page again.";
const SILENCE = "The console did not answer. The command may have taken effect, or may within five seconds: the queue shows what still waits.";
const isJson = (answer) => (answer.headers.get("content-type") || "").includes("json");

/** An answer that is none of our own: of a proxy, or of a console that failed, nobody knows how far it had come. */
const refusal = (answer) => (answer.status >= 500 ? SILENCE : NOBODY);

async function act(event) {
  event.preventDefault();
  if (all) return actOnAll(event.submitter.value);
  const body = new FormData(form, event.submitter);
  for (const id of selected) body.append("request", id);
  try {
    const answer = await fetch(form.action, { method: "POST", body, headers: { accept: "application/json" } });
    const ok = answer.ok && isJson(answer);
    answered(isJson(answer) ? (await answer.json()).message : refusal(answer), ok);
    if (ok) clearSelection();
  } catch {
    answered(SILENCE, false);
  }
  return undefined;
}

// ---- all that match -------------------------------------------------------------------------------------------------------

let telling = null; // what ends it
const WORDS = {
  cancel: ["Cancel", "Their clients get an error. It cannot be taken back."],
  pause: ["Hold back", "They stay where they are, and their time runs on."],
  resume: ["Let go on", "They are served in their order again."],
  reprioritise: ["Change the priority of", ""],
};

function filterInWords() {
  const button = view.key && [...find("[data-classes]").children].find((each) => each.dataset.key === view.key);
  const parts = [];
  if (button) parts.push(`in class ${cell(button, "name").textContent} of ${cell(button, "tenant").textContent}`);
  if (view.text) parts.push(`with "${view.text}"`);
  return parts.length ? parts.join(", ") : "whatever its class and tenant";
}

async function actOnAll(kind) {
  const until = now(); // what arrives while the question is open is not meant
  const order = [...crypto.getRandomValues(new Uint8Array(16))].map((each) => each.toString(16).padStart(2, "0")).join("");
  const body = new FormData(form);
  const said = { kind, order, key: view.key, text: view.text, until: until.toFixed(3) };
  for (const [name, value] of Object.entries(said)) body.set(name, value);
  const [what, why] = WORDS[kind];
  const matching = data?.matching ?? 0; // while the question is open the queue may be asked for anew, and be unknown
  const priority = kind === "reprioritise" ? `They get priority ${body.get("priority")}. ` : "";
  const title = `${what} all ${count(matching)} that wait ${filterInWords()}?`;
  if (!(await question(title, `${priority}${why} What arrives from now on is not touched.`, what))) return;
  telling = new AbortController();
  showSelected();
  progress({ told: 0, of: matching });
  let last = null;
  try {
    const answer = await fetch(form.dataset.allAt, { method: "POST", body, signal: telling.signal, headers: { accept: "application/json" } });
    if (!isJson(answer) && answer.status >= 500) await sayWhatCame(order, last, "The console did not answer.");
    else if (!answer.ok || !isJson(answer)) answered(isJson(answer) ? (await answer.json()).message : NOBODY, false);
    else {
      for await (const line of linesOf(answer)) {
        last = line;
        progress(line);
      }
      if (last?.message) answered(last.message, last.ok);
      else await sayWhatCame(order, last, "The console fell silent.");
    }
  } catch (error) {
    await sayWhatCame(order, last, error.name === "AbortError" ? "Stopped." : "The console did not answer.");
  }
  telling = null;
  find("[data-progress]").hidden = true;
  find("[data-stop]").disabled = false;
  if (last?.ok) chooseAll(false);
  showSelected();
}

const RECORDED_WITHIN_MS = 8000; // the part that is being told is waited for
const LOOK_EVERY_MS = 250;

/** A command whose answer did not come to its end: what was being told just then is in its record. */
async function sayWhatCame(order, last, why) {
  find("[data-stop]").disabled = true;
  put(find("[data-progress-text]"), `${why} Waiting for what was being told`);
  const until = performance.now() + RECORDED_WITHIN_MS;
  while (performance.now() < until) {
    const came = await recordOf(order);
    if (came?.known) return answered(came.message, came.ok);
    await new Promise((resume) => setTimeout(resume, LOOK_EVERY_MS));
  }
  return answered(`${why} ${soFar(last)} If more was done, the audit will have it.`, false);
}

async function recordOf(order) {
  try {
    const answer = await fetch(`${form.dataset.allAt}${order}/`, { headers: { accept: "application/json" }, signal: AbortSignal.timeout(2000) });
    return answer.ok && isJson(answer) ? await answer.json() : null;
  } catch {
    return null; // the console is away: asked again
  }
}

const soFar = (line) => (line ? `${count(line.told)} of ${count(line.of)} were told, ${count(line.applied)} of them applied.` : "Nothing is known of it.");

function progress(line) {
  const share = line.of ? line.told / line.of : 1;
  const meter = find("[data-progress] .meter");
  find("[data-progress]").hidden = false;
  meter.firstElementChild.style.width = `${(share * 100).toFixed(1)}%`;
  meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
  put(find("[data-progress-text]"), `${count(line.told)} of ${count(line.of)} told`);
}

/** The lines of an answer as they come, each a JSON value. */
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
  find("[data-all]").addEventListener("click", () => chooseAll(!all));
  find("[data-stop]").addEventListener("click", () => telling?.abort());
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
  put(event.target, view.held ? "Show live again" : "Hold the picture");
  find("[data-table]").setAttribute("aria-busy", "true"); // until the picture of this moment has come
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
    if (["held", "key", "text"].some((name) => news[name] !== view[name])) return; // made for what was asked before
    find("[data-table]").removeAttribute("aria-busy");
    data = news;
    showClasses();
    show();
  },
  state: stateShower(find("[data-live-state]"), find("[data-banner]")),
});
