// Audit: the list stays as it was loaded, so that rows do not move while they are read; newer decisions are counted.

import { count } from "../format.js";
import { LiveTopic } from "../live.js";

const button = document.querySelector("[data-newer]");
// The ids on the page, not the highest one: decisions of several processes are not stored in order of time.
const listed = new Set(button.dataset.listed.split(" "));
const newer = new Set();
let more = ""; // " or more" when all decisions in the snapshot are new to this page: there may be others before them

new LiveTopic("decisions", {
  data({ decisions }, { type }) {
    const fresh = decisions.filter(({ id }) => !listed.has(id) && !newer.has(id));
    if (type === "snapshot" && fresh.length && fresh.length === decisions.length) more = " or more";
    for (const { id } of fresh) newer.add(id);
    button.hidden = newer.size === 0;
    button.textContent = newer.size === 1 && !more ? "Show 1 newer decision" : `Show ${count(newer.size)}${more} newer decisions`;
  },
  state() {},
});
