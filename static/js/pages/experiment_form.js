// The form of a new experiment: shows the fields of the selected traffic and fleet, and validates live.

import { liveCheck } from "../check.js";
import { setMoment } from "../moments.js";

const form = document.querySelector("[data-experiment-form]");
const HOUR_MS = 3600 * 1000;

/** `data-part="kind:window"`: shown while that field has that value. */
function showParts() {
  for (const part of form.querySelectorAll("[data-part]")) {
    const [name, value] = part.dataset.part.split(":");
    part.hidden = form.elements[name].value !== value;
  }
}

function setWindow(wanted) {
  const now = new Date();
  let [since, until] = [new Date(now.getTime() - Number(wanted) * 1000), now];
  if (wanted === "yesterday") {
    until = new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth(), now.getUTCDate()));
    since = new Date(until.getTime() - 24 * HOUR_MS);
  }
  setMoment(form.elements.since, since);
  setMoment(form.elements.until, until);
}

const presets = form.querySelector("[data-presets]");
presets.hidden = false;
presets.addEventListener("click", (event) => event.target.dataset.window && setWindow(event.target.dataset.window));
form.addEventListener("change", showParts);
showParts();
liveCheck(form, form.dataset.check, (said) => {
  form.querySelector("[data-estimate]").textContent = said.summary;
});
