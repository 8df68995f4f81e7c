// Queue: the browser holds the rows in view only. Their slack runs down between frames by the clock of this browser.

import { DASH, clock, count, ms } from "../format.js";
import { LiveTopic, stateShower } from "../live.js";
import { RowWindow } from "../rows.js";

const TICK_MS = 200;
const TYPING_MS = 150;
const find = (selector, root = document) => root.querySelector(selector);
const cell = (row, name) => row.querySelector(`[data-cell="${name}"]`);
const form = find("[data-command]");
const canAct = Boolean(find("[data-act]"));
const view = { offset: 0, limit: 60, key: "", text: "", held: false };
const selected = new Set();
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
  for (const item of data.by_class) {
    let button = known.get(item.key);
    known.delete(item.key);
    if (!button) {
      button = find("#queue-class").content.firstElementChild.cloneNode(true);
      button.dataset.key = item.key;
      button.addEventListener("click", () => choose(item.key));
      holder.append(button);
    }
    put(cell(button, "name"), item.name);
    put(cell(button, "count"), count(item.count));
    put(cell(button, "tenant"), item.tenant);
    const slack = item.due_at - now();
    put(cell(button, "slack"), `least slack ${ms(slack)}`);
    cell(button, "slack").classList.toggle("miss", slack < 0);
  }
  for (const [key, button] of known) {
    if (key !== view.key) button.remove();
    else {
      put(cell(button, "count"), "0");
      put(cell(button, "slack"), "");
    }
  }
}

function choose(key) {
  view.key = view.key === key ? "" : key;
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
    box.checked = selected.has(row.id);
    box.setAttribute("aria-label", `Select request ${row.id}`);
  }
  return element;
}

function update(element, row) {
  element.classList.toggle("left", Boolean(row.left));
  cell(element, "left").hidden = !row.left;
  if (row.left) {
    element.row = null;
    put(cell(element, "start"), "");
    cell(element, "paused").hidden = true;
    if (canAct) cell(element, "select").disabled = true;
    return;
  }
  element.row = row;
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
  showEmpty(Boolean(filtered));
  showSelected();
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
    put(text, "Requests go to an engine as soon as they arrive while the fleet has room.");
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
  const start = cell(element, "start");
  put(start, row.paused ? "" : row.start_at === null ? DASH : `in ${ms(Math.max(0, row.start_at - now()))}`);
  start.classList.toggle("miss", row.start_at !== null && row.start_at > row.due_at);
  const spare = row.hopeless ? "too late to make it: served last, from what is spare" : "";
  start.title = row.start_at === null ? spare : `about ${clock(new Date(row.start_at * 1000))}`;
}

function tick() {
  for (const element of rows.elements.values()) if (element.row) tickRow(element);
}

// ---- filter, hold, select, act ------------------------------------------------------------------------------------------

function showSelected() {
  if (!canAct) return;
  for (const button of form.querySelectorAll("[data-act]")) button.disabled = selected.size === 0;
  put(find("[data-selected]"), selected.size ? `${count(selected.size)} selected` : "None selected");
}

async function act(event) {
  event.preventDefault();
  const body = new FormData(form, event.submitter);
  for (const id of selected) body.append("request", id);
  const box = find("[data-answer]");
  let ok = false;
  try {
    const answer = await fetch(form.action, { method: "POST", body, headers: { accept: "application/json" } });
    const readable = (answer.headers.get("content-type") || "").includes("json");
    ok = answer.ok && readable;
    box.textContent = readable ? (await answer.json()).message : "Nothing was done: your session has ended or may not do this. Load the page again.";
  } catch {
    box.textContent = "The console did not answer. The command may still take effect within five seconds.";
  }
  box.className = `banner ${ok ? "done" : "lost"}`;
  box.hidden = false;
  if (ok) clearSelection();
}

function clearSelection() {
  selected.clear();
  for (const input of form.querySelectorAll('[data-cell="select"]:checked')) input.checked = false;
  showSelected();
}

let typing = 0;
find("[data-filter]").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    view.text = event.target.value.trim();
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
    if (news.held !== view.held) return; // made before the picture was held, or let go
    find("[data-table]").removeAttribute("aria-busy");
    data = news;
    showClasses();
    show();
  },
  state: stateShower(find("[data-live-state]"), find("[data-banner]")),
});
