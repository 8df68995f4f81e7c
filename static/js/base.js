// Shared by every page: local times, confirmation of irreversible actions, widths of meters.

import { localTimes, nameZone } from "./format.js";
import { localMoments } from "./moments.js";

/** Style attributes are forbidden by the content security policy: shares travel as data-share and become widths here. */
export function fillMeters(root = document) {
  for (const bar of root.querySelectorAll("[data-share]")) {
    const share = Math.min(1, Math.max(0, Number(bar.dataset.share)));
    bar.style.width = `${(share * 100).toFixed(1)}%`;
    if (bar.dataset.start) bar.style.left = `${(Math.min(1, Math.max(0, Number(bar.dataset.start))) * 100).toFixed(2)}%`;
  }
}

export function refresh(root = document) {
  localTimes(root);
  nameZone(root);
  localMoments(root);
  fillMeters(root);
}

/** Asks for confirmation of an irreversible action; resolves to true if it was confirmed. */
export function question(title, text, yes = "Continue") {
  const dialog = document.getElementById("confirm");
  dialog.querySelector("[data-confirm-title]").textContent = title;
  dialog.querySelector("[data-confirm-text]").textContent = text;
  dialog.querySelector("[data-confirm-yes]").textContent = yes;
  dialog.returnValue = "no";
  const answered = new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
  });
  dialog.showModal();
  return answered;
}

async function confirmFirst(event) {
  const form = event.target.closest("form[data-confirm]");
  if (!form || form.dataset.confirmed) return;
  event.preventDefault();
  const { confirm, confirmText, confirmYes } = form.dataset;
  if (!(await question(confirm, confirmText || "", confirmYes))) return;
  form.dataset.confirmed = "yes";
  form.requestSubmit(event.submitter || undefined);
  delete form.dataset.confirmed;
}

document.addEventListener("submit", confirmFirst, true);
// htmx fires this on the new content; the element that requested it may already have been replaced.
document.addEventListener("htmx:after:process", () => refresh());
refresh();
