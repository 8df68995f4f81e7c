// Concurrent requests of each tenant against its quota, live from the gateways. All other figures are from page load.

import { DASH, count } from "../format.js";
import { LiveTopic, stateShower } from "../live.js";

const NEAR = 0.8; // as in console/views/accounts/tenants.py
const places = [...document.querySelectorAll("[data-at-once]")];

function show(place, used) {
  const limit = place.dataset.limit === "" ? Infinity : Number(place.dataset.limit);
  const number = place.querySelector("[data-used]");
  const text = used === null ? DASH : count(used);
  if (number.textContent !== text) number.textContent = text;
  const status = limit === Infinity || used === null ? "" : used >= limit ? "bad" : used >= NEAR * limit ? "warn" : "ok";
  number.className = { bad: "miss", warn: "near" }[status] || "";
  const meter = place.querySelector(".meter");
  if (!meter) return;
  meter.className = `meter ${status}`;
  meter.firstElementChild.style.width = `${(used ? Math.min(1, used / limit) * 100 : 0).toFixed(1)}%`;
}

const showState = stateShower(document.querySelector("[data-live-state]"), document.querySelector("[data-banner]"));

new LiveTopic("overview", {
  data(data, frame) {
    if (frame.age_s === null) return;
    for (const place of places) show(place, data.tenants[place.dataset.atOnce] ?? 0);
  },
  state(state, text) {
    showState(state, text);
    if (state === "lost") for (const place of places) show(place, null); // an old number would look current
  },
});
