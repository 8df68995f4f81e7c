// Fleet, one instance, Scaling: parts that move by themselves, and charts that are drawn again where they have changed.

import { draw } from "../charts.js";
import { stateShower } from "../live.js";
import { PolledParts } from "../poll.js";

const drawn = new Map(); // by name: the element, and what it shows as text

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
const place = document.querySelector("[data-polled]"); // none where a moment of the past is shown
if (stored) drawAll(JSON.parse(stored.textContent));
if (place) {
  const said = JSON.parse(document.getElementById("polled").textContent);
  const state = stateShower(document.querySelector("[data-live-state]"), document.querySelector("[data-banner]"));
  new PolledParts(place.dataset.polled, said, { state, charts: drawAll });
}
