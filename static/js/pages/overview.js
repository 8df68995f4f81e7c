// Overview: live rows from the gateways, hour and 24 h figures from the database every 15 s, decisions as they are made.

import { SERIES, draw, extend } from "../charts.js";
import { count, money, ms, percent, rate, timeElement, tokensPerSecond } from "../format.js";
import { LiveTopic, stateShower } from "../live.js";
import { morph } from "../morph.js";

const HISTORY_MS = 15000;
const DECISIONS_KEPT = 60;
const CARDS_MAX = 24; // as in console/views/overview.py
const page = document.getElementById("page").dataset;
const find = (selector, root = document) => root.querySelector(selector);
const cell = (row, name) => row.querySelector(`[data-cell="${name}"]`);

function put(element, text) {
  if (element && element.textContent !== text) element.textContent = text;
}

function badge(element, status, text) {
  element.className = `badge ${status}`;
  put(element, text);
}

// ---- summary and totals -------------------------------------------------------------------------------------------------

let current = true; // is the data on screen live?

/** Stale figures stay on the page in grey, under a headline in the past tense. */
function showCurrency() {
  for (const part of document.querySelectorAll("[data-live]")) part.toggleAttribute("data-stale", !current);
  const { is, was } = find("#summary").dataset;
  put(find("[data-summary]"), current ? is : was);
}

function showSummary(summary) {
  const box = find("#summary");
  Object.assign(box.dataset, { status: summary.status, is: summary.headline, was: summary.was ?? summary.headline });
  showCurrency();
  // Morphed rather than replaced: a link that is replaced while it is pressed loses the click, and with it the focus.
  const list = find("[data-summary-lines]");
  const fresh = list.cloneNode();
  fresh.append(...summary.lines.map(summaryLine));
  morph(list, fresh);
}

function summaryLine(line) {
  const item = document.createElement("li");
  const label = document.createElement("span");
  badge(label, line.status, line.label);
  const name = document.createElement("strong");
  name.textContent = line.name;
  if (line.key) item.dataset.key = line.key;
  label.dataset.key = "status";
  item.append(label, " ", line.key ? toMisses(line.key, name) : name, ` ${line.text}`);
  return item;
}

const ofClass = (tenant, sloClass) => new URLSearchParams({ tenant, slo_class: sloClass || "(none)" });
const missesOf = (tenant, sloClass) => `${page.requestsUrl}?${ofClass(tenant, sloClass)}&attained=no`;
const decisionsOf = (tenant, sloClass) => `${page.auditUrl}?${ofClass(tenant, sloClass)}`;

function toMisses(key, name) {
  const link = document.createElement("a");
  link.dataset.key = "misses";
  link.href = missesOf(key.slice(0, key.indexOf("/")), key.slice(key.indexOf("/") + 1));
  link.append(name);
  return link;
}

const TOTALS = {
  attainment: percent,
  finished: count,
  goodput_tps: tokensPerSecond,
  arrival_rate: rate,
  service_rate: rate,
  queued: count,
  in_flight: count,
  oldest_slack_s: (value) => `least slack ${ms(value)}`,
  policy: (value) => value || "–",
};

function showTotals(totals) {
  for (const [name, format] of Object.entries(TOTALS)) put(find(`[data-total="${name}"]`), format(totals[name]));
}

// ---- classes ------------------------------------------------------------------------------------------------------------

const rows = new Map();
for (const row of document.querySelectorAll("[data-classes] tr")) rows.set(row.dataset.key, row);

function rowFor(item) {
  if (!rows.has(item.key)) {
    const row = find("#class-row").content.firstElementChild.cloneNode(true);
    row.dataset.key = item.key;
    put(cell(row, "name"), item.name);
    put(cell(row, "tenant"), item.tenant);
    cell(row, "requests").href = missesOf(item.tenant, item.slo_class);
    cell(row, "queue").href = `${page.queueUrl}?${new URLSearchParams({ key: item.key })}`;
    showSeries(row, item);
    cell(row, "decisions").href = decisionsOf(item.tenant, item.slo_class);
    find("[data-classes]").append(row);
    rows.set(item.key, row);
    find("[data-classes-empty]").hidden = true;
  }
  return rows.get(item.key);
}

// ---- one colour per class, in the table, the legend and every chart --------------------------------------------------------

const palette = new Map();

function seriesOf(item) {
  if (!palette.has(item.key)) palette.set(item.key, item.series ?? Math.max(-1, ...palette.values()) + 1);
  return palette.get(item.key);
}

function showSeries(row, item) {
  const name = `series-${(seriesOf(item) % SERIES) + 1}`;
  cell(row, "chip").className = `chip ${name}`;
  const legend = find("[data-legend]");
  if (legend.querySelector(`[data-key="${CSS.escape(item.key)}"]`)) return;
  const entry = document.createElement("span");
  entry.dataset.key = item.key;
  const chip = document.createElement("i");
  chip.className = `chip ${name}`;
  entry.append(chip, fullName(item));
  legend.append(entry);
}

function showClass(item) {
  const row = rowFor(item);
  row.dataset.status = item.status;
  if (!palette.has(item.key)) showSeries(row, item);
  badge(cell(row, "status"), item.status, item.status_text);
  const now = cell(row, "now");
  put(now, percent(item.attainment));
  now.className = { bad: "miss", warn: "near", ok: "met" }[item.status] || "";
  put(cell(row, "now-count"), item.finished ? `${count(item.finished)} request${item.finished === 1 ? "" : "s"}` : "");
  put(cell(row, "now-budget"), item.now_budget);
  put(cell(row, "target"), percent(item.target));
  put(cell(row, "queued"), count(item.queued));
  put(cell(row, "slack"), item.oldest_slack_s === null ? "" : `slack ${ms(item.oldest_slack_s)}`);
  cell(row, "slack").classList.toggle("miss", item.oldest_slack_s < 0);
  put(cell(row, "ttft"), `${ms(item.ttft_p50_s)} / ${ms(item.ttft_p95_s)}`);
  put(cell(row, "ttft-counted"), item.ttft_counted);
  put(cell(row, "why"), item.why || "–");
}

const IDLE = {
  status: "idle", status_text: "no traffic", attainment: null, finished: 0, now_budget: "", queued: 0, oldest_slack_s: null,
  ttft_p50_s: null, ttft_p95_s: null, ttft_counted: "no requests in 60 s", why: "",
};

function showClasses(items) {
  const present = new Set(items.map((item) => item.key));
  items.forEach(showClass);
  for (const [key, row] of rows) {
    if (present.has(key) || row.dataset.status === "idle") continue;
    showClass({ ...IDLE, key, target: parseFloat(cell(row, "target").textContent) / 100 });
  }
}

// ---- fleet --------------------------------------------------------------------------------------------------------------

const STATES = { up: "ok", draining: "warn", down: "bad", asleep: "idle" };
const loadStatus = (load) => (load > 0.95 ? "bad" : load > 0.8 ? "warn" : "ok");

function showInstance(list, item) {
  let card = list.querySelector(`[data-instance="${CSS.escape(item.id)}"]`);
  if (!card) {
    card = find("#instance-row").content.firstElementChild.cloneNode(true);
    card.dataset.instance = item.id;
    cell(card, "id").href = `${page.instanceUrl}${item.id.split("/").map(encodeURIComponent).join("/")}/`;
    list.append(card);
  }
  for (const name of ["id", "role", "model"]) put(cell(card, name), item[name]);
  badge(cell(card, "state"), STATES[item.state] || "idle", item.state);
  card.title = `${item.id}, ${item.role} of ${item.model}, ${item.state}, load ${percent(item.utilisation, 0)}`;
  card.dataset.status = item.state === "up" ? loadStatus(item.utilisation) : STATES[item.state] || "idle";
  const meter = cell(card, "meter");
  meter.className = `meter ${loadStatus(item.utilisation)}`;
  meter.firstElementChild.style.width = `${Math.min(100, item.utilisation * 100).toFixed(1)}%`;
  put(cell(card, "load"), percent(item.utilisation, 0));
  put(cell(card, "running"), count(item.running));
  put(cell(card, "waiting"), count(item.waiting));
}

function showRoles(roles) {
  const list = find("[data-roles]");
  const text = roles.map((item) => `${item.role} ${item.text}`).join();
  if (list.dataset.shown === text) return;
  list.dataset.shown = text;
  list.replaceChildren(
    ...roles.map((item) => {
      const entry = document.createElement("li");
      const name = document.createElement("strong");
      const states = document.createElement("span");
      name.textContent = item.role;
      states.className = "muted";
      states.textContent = item.text;
      entry.append(name, " ", states);
      return entry;
    }),
  );
}

function showFleet(instances) {
  const list = find("[data-instances]");
  list.toggleAttribute("data-dense", instances.length > CARDS_MAX);
  const present = new Set(instances.map((item) => item.id));
  for (const card of [...list.children]) if (!present.has(card.dataset.instance)) card.remove();
  instances.forEach((item) => showInstance(list, item));
  find("[data-instances-empty]").hidden = instances.length > 0;
  put(find("[data-fleet-count]"), count(instances.length));
}

// ---- charts and history from the database ---------------------------------------------------------------------------------

let lastPoint = 0;

function extendCharts(data, at) {
  if (at - lastPoint < 2) return;
  lastPoint = at;
  const series = (value) => Object.fromEntries(data.classes.map((item) => [item.key, { name: fullName(item), series: seriesOf(item), value: value(item) }]));
  extend(find('[data-chart="attainment"]'), at, series((item) => item.attainment ?? undefined));
  extend(find('[data-chart="goodput"]'), at, series((item) => item.goodput_tps));
  extend(find('[data-chart="queue"]'), at, series((item) => item.queued));
}

const fullName = (item) => `${item.name} · ${item.tenant}`;

function showBudget(row, item) {
  put(cell(row, "budget"), item.budget_text);
  const meter = cell(row, "budget-meter");
  meter.className = `meter ${item.budget_status}`;
  meter.firstElementChild.style.width = `${item.budget_share * 100}%`;
}

function showHistory(history) {
  for (const item of history.classes) {
    const row = rowFor(item);
    showSeries(row, item);
    put(cell(row, "hour"), percent(item.hour));
    put(cell(row, "hour-budget"), item.hour_budget);
    put(cell(row, "day"), percent(item.day));
    put(cell(row, "ttft-target"), item.ttft_target_s ? `target ${ms(item.ttft_target_s)}` : "");
    if (row.dataset.status === "idle") put(cell(row, "target"), percent(item.target));
    showBudget(row, item);
  }
  put(find('[data-history="cost_per_hour"]'), money(history.cost_per_hour));
  for (const name of ["cost_whose", "cost_hour"]) put(find(`[data-history="${name}"]`), history[name]);
  for (const [name, spec] of Object.entries(history.charts)) draw(find(`[data-chart="${name}"]`), spec);
}

let historyAt = Date.now() / 1000;

/** Live frames continue while the database is unavailable: the history shows its own age. */
function historyState(fresh) {
  if (fresh) historyAt = Date.now() / 1000;
  const holder = find("[data-history-state]");
  holder.className = fresh ? "" : "near";
  holder.replaceChildren(fresh ? "as of " : "last updated at ", timeElement(historyAt));
}

async function pollHistory() {
  if (!document.hidden) {
    try {
      const answer = await fetch(page.historyUrl, { headers: { accept: "application/json" } });
      if (answer.ok) showHistory(await answer.json());
      historyState(answer.ok);
    } catch (error) {
      historyState(false);
      console.info("overview history unavailable", error.message);
    }
  }
  setTimeout(pollHistory, HISTORY_MS);
}

// ---- decisions ----------------------------------------------------------------------------------------------------------

function decisionItem(decision) {
  const item = find("#decision-row").content.firstElementChild.cloneNode(true);
  item.dataset.decision = decision.id;
  item.dataset.at = decision.at;
  cell(item, "at").replaceChildren(timeElement(decision.at));
  put(cell(item, "sentence"), decision.sentence);
  if (/^[0-9]+$/.test(decision.id)) cell(item, "sentence").href = `${page.auditUrl}${decision.id}/`;
  put(cell(item, "figures"), decision.figures_text);
  return item;
}

function showDecisions(data, frame) {
  const list = find("[data-decisions]");
  const told = new Set(data.decisions.map((decision) => String(decision.id)));
  if (frame.type === "snapshot") for (const item of [...list.children]) if (!told.has(item.dataset.decision)) item.remove();
  const shown = new Set([...list.children].map((item) => item.dataset.decision));
  for (const decision of data.decisions) {
    if (shown.has(String(decision.id))) continue; // what stays is left alone: it may be pressed or have the focus
    // Most are newer than all in the list; one that was lost on the way and recovered is inserted in order.
    const older = [...list.children].find((item) => Number(item.dataset.at) <= decision.at);
    list.insertBefore(decisionItem(decision), older || null);
  }
  while (list.children.length > DECISIONS_KEPT) list.lastElementChild.remove();
  find("[data-decisions-empty]").hidden = list.children.length > 0;
}

// ---- start --------------------------------------------------------------------------------------------------------------

function start() {
  const history = JSON.parse(document.getElementById("history").textContent);
  draw(find('[data-chart="queue"]'), history.queue_chart);
  showHistory(history);
  setTimeout(pollHistory, HISTORY_MS);
  const showState = stateShower(find("[data-live-state]"), find("[data-banner]"));
  new LiveTopic("overview", {
    data(data, frame) {
      if (frame.age_s === null) return;
      showSummary(data.summary);
      showTotals(data.totals);
      showClasses(data.classes);
      showFleet(data.instances);
      showRoles(data.roles);
      extendCharts(data, frame.at);
    },
    state(state, text) {
      showState(state, text);
      current = state === "live";
      showCurrency();
    },
  });
  new LiveTopic("decisions", {
    data: showDecisions,
    state: (state, text) => put(find("[data-decisions-state]"), state === "live" ? "" : text),
  });
}

start();
