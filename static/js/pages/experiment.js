// One experiment: its progress while it runs, its charts when it is done.

import { fillMeters } from "../base.js";
import { percent } from "../format.js";
import { LiveTopic, stateShower } from "../live.js";
import { draw, savePng } from "../plots.js";

const find = (selector, root = document) => root.querySelector(selector);
const moving = find("[data-moving]");
const stored = find("#experiment-charts");

// ---- progress -------------------------------------------------------------------------------------------------------------

function show(each) {
  if (each.slug !== moving.dataset.experiment) return;
  if (each.state !== "queued" && each.state !== "running") {
    location.reload();
    return;
  }
  const meter = find('[data-cell="meter"]', moving);
  meter.firstElementChild.dataset.share = String(each.progress);
  meter.setAttribute("aria-valuenow", String(Math.round(each.progress * 100)));
  find('[data-cell="percent"]', moving).textContent = percent(each.progress, 0);
  const waits = each.state === "queued" ? "Waiting for a worker" : each.step;
  find('[data-cell="step"]', moving).textContent = each.waiting ? "Worker not responding; another one will take over" : waits;
  const badge = find('.lead [data-cell="state"]');
  badge.textContent = each.state;
  badge.className = `badge ${each.state === "running" ? "accent" : "idle"}`;
  fillMeters(moving);
}

if (moving) {
  const say = stateShower(find("[data-live-state]"), find("[data-banner]"));
  new LiveTopic("experiments", {
    data: (data) => data.experiments.forEach(show),
    state: (state, text) => say(state, state === "live" ? "Live" : text), // a state has no age: it is current until it changes
  });
}

// ---- charts ---------------------------------------------------------------------------------------------------------------

const charts = stored ? JSON.parse(stored.textContent) : null;
const BY_CLASS = ["ttft", "tpot"];

function redraw() {
  const rate = charts.by_rate[find("[data-rate]").value];
  const name = find("[data-class]").value;
  for (const element of document.querySelectorAll("[data-chart]")) {
    const key = element.dataset.chart;
    const spec = charts.over_rates?.[key] || rate[key];
    draw(element, BY_CLASS.includes(key) ? spec[name] : spec);
  }
}

if (charts) {
  redraw();
  find("[data-rate]").addEventListener("change", redraw);
  find("[data-class]").addEventListener("change", redraw);
  for (const button of document.querySelectorAll("[data-png]")) {
    const name = button.dataset.png;
    const title = find(`#chart-${name}-title`).textContent;
    const file = `${location.pathname.split("/")[2]}-${name}`;
    button.addEventListener("click", () => savePng(find(`[data-chart="${name}"]`), `${document.title}: ${title}`, file));
  }
}

// ---- link -----------------------------------------------------------------------------------------------------------------

const copy = find("[data-copy]");
if (navigator.clipboard) {
  copy.hidden = false;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(location.href);
    copy.textContent = "Copied";
  });
}
