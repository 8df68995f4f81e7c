// Priorities of a mapping: added and removed at the low end; the server validates their targets.

const holder = document.querySelector("[data-levels]");
const total = document.querySelector(`[name="${holder.dataset.prefix}-TOTAL_FORMS"]`);
const drop = document.querySelector("[data-drop-level]");
const add = document.querySelector("[data-add-level]");

function renumber() {
  const size = holder.children.length;
  total.value = String(size);
  drop.disabled = size <= 1;
  add.disabled = size >= Number(holder.dataset.max);
}

add.addEventListener("click", () => {
  const index = holder.children.length;
  const level = document.getElementById("level").content.firstElementChild.cloneNode(true);
  for (const element of level.querySelectorAll("[name], [id], [for], [aria-describedby]")) {
    for (const name of ["name", "id", "for", "aria-describedby"]) {
      const value = element.getAttribute(name);
      if (value) element.setAttribute(name, value.replaceAll("__prefix__", String(index)));
    }
  }
  level.querySelector("[data-level-number]").textContent = String(index);
  const above = holder.lastElementChild;
  for (const input of level.querySelectorAll("input")) {
    const twin = above?.querySelector(`[name="${input.name.replace(`-${index}-`, `-${index - 1}-`)}"]`);
    if (twin) input.value = twin.value;
  }
  holder.append(level);
  renumber();
  level.querySelector("input").focus();
});

drop.addEventListener("click", () => {
  holder.lastElementChild.remove();
  renumber();
  drop.focus();
});

renumber();
