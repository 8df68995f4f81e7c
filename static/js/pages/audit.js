// Audit: the list stays as it was loaded, so that nothing moves under a reader; what was decided since is counted.

import { count } from "../format.js";
import { LiveTopic } from "../live.js";

const button = document.querySelector("[data-newer]");
// Those on the page, not a highest number: what several processes decide is not stored in the order of its time.
const listed = new Set(button.dataset.listed.split(" "));
const newer = new Set();
let more = ""; // said where none of the newest that the console keeps at hand was known here: there may be others

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
