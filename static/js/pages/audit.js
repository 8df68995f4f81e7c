// Audit: the list stays as it was loaded, so that nothing moves under a reader; what was decided since is counted.

import { count } from "../format.js";
import { LiveTopic } from "../live.js";

const button = document.querySelector("[data-newer]");
const newest = Number(button.dataset.newer);
const newer = new Set();

new LiveTopic("decisions", {
  data(data) {
    for (const { id } of data.decisions) if (Number(id) > newest) newer.add(id);
    button.hidden = newer.size === 0;
    button.textContent = newer.size === 1 ? "Show 1 newer decision" : `Show ${count(newer.size)} newer decisions`;
  },
  state() {},
});
