// Charts that are drawn once, from data embedded in the page.

import { draw } from "../charts.js";

const specs = JSON.parse(document.getElementById("charts").textContent);
for (const [name, spec] of Object.entries(specs)) {
  const element = document.querySelector(`[data-chart="${name}"]`);
  if (element) draw(element, spec); // absent while there is nothing to show
}
