// Fleet, one instance, Scaling, one workflow: parts that update by themselves, and charts that are redrawn when they change.

import { draw } from "../charts.js";
import { stateShower } from "../live.js";
import { PolledParts } from "../poll.js";

const drawn = new Map(); // by name: the element, and its spec as JSON

function drawAll(specs) {
  for (const [name, spec] of Object.entries(specs)) {
    const element = document.querySelector(`[data-chart="${CSS.escape(name)}"]`);
    const text = JSON.stringify(spec);
    const known = drawn.get(name);
    if (!element || (known?.element === element && known.text === text)) continue;
    draw(element, spec);
    drawn.set(name, { element, text });
  }
}

const stored = document.getElementById("charts");
const place = document.querySelector("[data-polled]"); // absent when a moment in the past is shown
if (stored) drawAll(JSON.parse(stored.textContent));
if (place) {
  const said = JSON.parse(document.getElementById("polled").textContent);
  const state = stateShower(document.querySelector("[data-live-state]"), document.querySelector("[data-banner]"));
  new PolledParts(place.dataset.polled, said, { state, charts: drawAll });
}
