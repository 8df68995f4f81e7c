// Fleet: shows only the instances that match what was typed, in the picture and in the table, also after they have moved.

import { count } from "../format.js";

const input = document.querySelector("[data-fleet-filter]");
const said = document.querySelector("[data-fleet-shown]");
const titleOf = (element) => element.querySelector("[title]")?.title ?? "";
const textOf = (element) => `${element.textContent} ${titleOf(element)} ${element.dataset.host}`.toLowerCase();

function apply() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (element) => words.every((word) => textOf(element).includes(word));
  const rows = [...document.querySelectorAll("[data-instance-rows] > tr")];
  for (const element of [...rows, ...document.querySelectorAll(".cells > li[data-key]")]) element.hidden = !matches(element);
  for (const host of document.querySelectorAll(".host")) host.hidden = words.length > 0 && !host.querySelector(".cells > li:not([hidden])");
  said.textContent = words.length ? `${count(rows.filter((row) => !row.hidden).length)} of ${count(rows.length)} instances` : "";
}

let typing = 0;
input.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => {
    const text = input.value.trim();
    history.replaceState(null, "", text ? `?${new URLSearchParams({ q: text })}` : location.pathname);
    apply();
  }, 150);
});
document.addEventListener("parts:shown", apply);
input.value = new URLSearchParams(location.search).get("q") || "";
apply();
