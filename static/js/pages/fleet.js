// Fleet: filters the instances of the topology and the table, also after live updates, and pages through the table.

import { count } from "../format.js";

const ROWS = matchMedia("(max-width: 48rem)").matches ? 10 : 25; // on a narrow screen a row is a card of several lines
const find = (selector) => document.querySelector(selector);
const input = find("[data-fleet-filter]");
const said = find("[data-fleet-shown]");
const pager = find("[data-pager]");
const asked = new URLSearchParams(location.search);
let page = Math.max(1, Math.trunc(Number(asked.get("page"))) || 1);
const titleOf = (element) => element.querySelector("[title]")?.title ?? "";
const textOf = (element) => `${element.textContent} ${titleOf(element)} ${element.dataset.host}`.toLowerCase();

function apply() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (element) => words.every((word) => textOf(element).includes(word));
  const all = [...document.querySelectorAll("[data-instance-rows] > tr")];
  const rows = all.filter(matches);
  showPage(all, rows);
  for (const element of document.querySelectorAll(".cells > li[data-key]")) element.hidden = !matches(element);
  for (const host of document.querySelectorAll(".host")) host.hidden = words.length > 0 && !host.querySelector(".cells > li:not([hidden])");
  said.textContent = words.length ? `${count(rows.length)} of ${count(all.length)} instances` : "";
}

function showPage(all, rows) {
  page = Math.min(page, Math.max(1, Math.ceil(rows.length / ROWS)));
  const first = (page - 1) * ROWS;
  const shown = new Set(rows.slice(first, first + ROWS));
  for (const row of all) row.hidden = !shown.has(row);
  pager.hidden = rows.length <= ROWS;
  const text = `${count(first + 1)} to ${count(first + shown.size)} of ${count(rows.length)} instances`;
  const holder = pager.querySelector("[data-page-shown]");
  if (holder.textContent !== text) holder.textContent = text;
  pager.querySelector('[data-turn="-1"]').disabled = page === 1;
  pager.querySelector('[data-turn="1"]').disabled = first + ROWS >= rows.length;
}

function remember() {
  const query = new URLSearchParams();
  const text = input.value.trim();
  if (text) query.set("q", text);
  if (page > 1) query.set("page", page);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
}

let typing = 0;
input.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    page = 1;
    apply();
    remember();
  }, 150);
});
pager.addEventListener("click", ({ target }) => {
  if (!target.dataset.turn) return;
  page += Number(target.dataset.turn);
  apply();
  remember();
  const heading = find("#instances-title");
  heading.scrollIntoView({ block: "start" });
  heading.focus({ preventScroll: true }); // screen readers continue at the new rows
});
document.addEventListener("parts:shown", apply);
input.value = asked.get("q") || "";
apply();
