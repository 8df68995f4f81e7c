// Queue: rows keep their element while they wait; slack runs down between frames by the clock of this browser.

import { DASH, count, ms } from "../format.js";
import { LiveTopic, stateShower } from "../live.js";

const TICK_MS = 200;
const find = (selector, root = document) => root.querySelector(selector);
const cell = (row, name) => row.querySelector(`[data-cell="${name}"]`);
const form = find("[data-command]");
const body = find("[data-rows]");
const canAct = Boolean(find("[data-act]"));

const state = { data: null, at: 0, chosen: "", text: "", frozen: false };
const elements = new Map(); // request id -> row element

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// ---- classes ------------------------------------------------------------------------------------------------------------

function showClasses(classes) {
  const holder = find("[data-classes]");
  const known = new Map([...holder.children].map((button) => [button.dataset.key, button]));
  for (const item of classes) {
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
    put(cell(button, "slack"), item.oldest_slack_s === null ? "" : `least slack ${ms(item.oldest_slack_s)}`);
    cell(button, "slack").classList.toggle("miss", item.oldest_slack_s < 0);
  }
  for (const [key, button] of known) if (key !== state.chosen) button.remove();
}

function choose(key) {
  state.chosen = state.chosen === key ? "" : key;
  for (const button of find("[data-classes]").children) button.setAttribute("aria-pressed", String(button.dataset.key === state.chosen));
  showRows();
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

function wanted(row) {
  if (state.chosen && `${row.tenant}/${row.slo_class}` !== state.chosen) return false;
  const text = state.text.toLowerCase();
  return !text || [row.id, row.tenant, row.slo_class, row.model].some((value) => value.toLowerCase().includes(text));
}

function build(row) {
  const element = find("#queue-row").content.firstElementChild.cloneNode(true);
  put(cell(element, "id"), row.id);
  put(cell(element, "class"), row.slo_class || "no class (defaults)");
  put(cell(element, "tenant"), row.tenant);
  put(cell(element, "model"), row.model);
  put(cell(element, "tokens"), `${count(row.prompt_tokens)} + ${count(row.output_tokens)}`);
  put(cell(element, "ttft"), `of ${ms(row.ttft_s)}`);
  if (canAct) {
    cell(element, "select").value = row.id;
    cell(element, "select").setAttribute("aria-label", `Select request ${row.id}`);
  }
  return element;
}

function showRows() {
  if (!state.data) return;
  const rows = state.data.rows.filter(wanted);
  const present = new Set(rows.map((row) => row.id));
  for (const [id, element] of elements) {
    if (present.has(id)) continue;
    element.remove();
    elements.delete(id);
  }
  let after = null;
  for (const row of rows) {
    let element = elements.get(row.id);
    if (!element) {
      element = build(row);
      elements.set(row.id, element);
    }
    element.row = row;
    put(cell(element, "priority"), row.priority === null ? DASH : String(row.priority));
    cell(element, "paused").hidden = !row.paused;
    const next = after ? after.nextElementSibling : body.firstElementChild;
    if (next !== element) body.insertBefore(element, next);
    after = element;
  }
  showCounts(rows.length);
  tick();
}

function showCounts(shown) {
  const { total, rows } = state.data;
  put(find("[data-total]"), count(total));
  const cut = total > rows.length ? `, the ${count(rows.length)} most urgent (of each class) are listed` : "";
  put(find("[data-shown]"), total ? `${count(shown)} shown of ${count(total)} waiting${cut}` : "");
  const empty = find("[data-empty]");
  empty.hidden = shown > 0;
  const filtered = total > 0;
  put(empty.children[0], filtered ? "Nothing matches the filter." : "Nothing is waiting.");
  empty.children[0].classList.remove("loading");
  put(empty.children[1], filtered ? "Clear it to see the rest." : "Requests go to an engine as soon as they arrive while the fleet has room.");
  showSelected();
}

function tick() {
  const since = state.frozen ? 0 : (performance.now() - state.at) / 1000;
  for (const element of elements.values()) {
    const { row } = element;
    const slack = row.slack_s - since;
    // What is late fills its bar again, in red, by how late it is.
    const share = row.ttft_s > 0 ? Math.min(1, Math.abs(slack) / row.ttft_s) : 1;
    put(cell(element, "slack"), slack < 0 ? `${ms(-slack)} late` : `${ms(slack)} left`);
    cell(element, "slack").className = slack < 0 ? "miss" : share < 0.25 ? "near" : "";
    const meter = cell(element, "meter");
    meter.className = `meter ${slack < 0 || row.hopeless ? "bad" : share < 0.25 ? "warn" : "ok"}`;
    meter.firstElementChild.style.width = `${(share * 100).toFixed(1)}%`;
    put(cell(element, "waited"), ms(row.waited_s + since));
  }
}

// ---- filter, hold, select, cancel ------------------------------------------------------------------------------------------

function showSelected() {
  if (!canAct) return;
  const chosen = form.querySelectorAll('input[name="request"]:checked').length;
  for (const button of form.querySelectorAll("[data-act]")) button.disabled = chosen === 0;
  put(find("[data-selected]"), chosen ? `${count(chosen)} selected` : "None selected");
}

async function act(event) {
  event.preventDefault();
  const data = new FormData(form, event.submitter);
  const answer = await fetch(form.action, { method: "POST", body: data, headers: { accept: "application/json" } });
  const box = find("[data-answer]");
  const said = await answer.json();
  box.className = `banner ${answer.ok ? "done" : "lost"}`;
  box.textContent = said.message;
  box.hidden = false;
  for (const input of form.querySelectorAll('input[name="request"]:checked')) input.checked = false;
  showSelected();
}

find("[data-filter]").addEventListener("input", (event) => {
  state.text = event.target.value.trim();
  showRows();
});
find("[data-freeze]").addEventListener("click", (event) => {
  state.frozen = !state.frozen;
  event.target.setAttribute("aria-pressed", String(state.frozen));
  put(event.target, state.frozen ? "Show live again" : "Hold the picture");
});
form.addEventListener("change", showSelected);
form.addEventListener("submit", act);
setInterval(() => document.hidden || state.frozen || tick(), TICK_MS);

new LiveTopic("queue", {
  data(data, frame) {
    if (frame.age_s === null || state.frozen) return;
    state.data = data;
    state.at = performance.now() - frame.age_s * 1000;
    showClasses(data.by_class);
    showRows();
  },
  state: stateShower(find("[data-live-state]"), find("[data-banner]")),
});
