// The list of experiments: live states and progress. Other columns of a finished row update on the next load.

import { fillMeters } from "../base.js";
import { LiveTopic, stateShower } from "../live.js";

const BADGES = { queued: "idle", running: "accent", done: "ok", failed: "bad", cancelled: "warn" };
const cell = (row, name) => row.querySelector(`[data-cell="${name}"]`);

function show(each) {
  const row = document.querySelector(`[data-experiment="${CSS.escape(each.slug)}"]`);
  if (!row) return;
  const moving = each.state === "queued" || each.state === "running";
  cell(row, "state").textContent = each.state;
  cell(row, "state").className = `badge ${BADGES[each.state]}`;
  cell(row, "meter").hidden = !moving;
  cell(row, "meter").firstElementChild.dataset.share = String(each.progress);
  if (moving) cell(row, "step").textContent = each.waiting ? "Worker not responding; another one will take over" : each.step;
  else if (each.state !== "failed") cell(row, "step").textContent = "";
  fillMeters(row);
}

const say = stateShower(document.querySelector("[data-live-state]"), document.querySelector("[data-banner]"));
new LiveTopic("experiments", {
  data: (data) => data.experiments.forEach(show),
  state: (state, text) => say(state, state === "live" ? "Live" : text), // states have no age: they are current until they change
});
