// Live validation: the form is posted to a URL that only validates; errors appear at their fields, but only at those that
// were edited.

import { ENDED, isEnded } from "./session.js";

const PAUSE_MS = 400;

/** The list of errors under a field, as the server renders it after a post. */
function showErrors(input, texts) {
  const holder = input.closest(".field");
  if (!holder) return;
  const id = `${input.id}_error`;
  let list = document.getElementById(id);
  if (!texts.length) {
    list?.remove();
    input.removeAttribute("aria-invalid");
    return;
  }
  if (!list) {
    list = document.createElement("ul");
    list.className = "error";
    list.id = id;
    holder.append(list);
  }
  list.replaceChildren(...texts.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  input.setAttribute("aria-invalid", "true");
}

function showAll(form, errors, touched) {
  for (const input of form.querySelectorAll("input[id], select[id], textarea[id]")) {
    // An error from the server stays until its field is edited.
    if (input.type !== "hidden" && touched.has(input.name)) showErrors(input, errors[input.name] || []);
  }
}

/** The JSON of an answer, or `trouble` with a message if it is not a valid answer. */
export async function answerOf(answer) {
  if (isEnded(answer)) return { trouble: ENDED };
  const json = (answer.headers.get("content-type") || "").includes("json");
  const said = json ? await answer.json() : {};
  return answer.ok && json ? said : { trouble: said.message || `The console could not validate the form (HTTP ${answer.status}).` };
}

/**
 * Posts the form to `address` shortly after each change and passes the answer to `then`. Overtaken answers are dropped;
 * `trouble` says why there is no answer. Returns a function that validates at once.
 */
export function liveCheck(form, address, then) {
  const touched = new Set();
  let timer = 0;
  let newest = 0;
  async function check() {
    const mine = ++newest;
    const head = { accept: "application/json" };
    let said;
    try {
      const answer = await fetch(address, { method: "POST", body: new FormData(form), headers: head, redirect: "manual" });
      said = await answerOf(answer);
    } catch {
      said = { trouble: "The console is not responding." };
    }
    if (mine !== newest) return;
    if (said.trouble) {
      then({ ...said, errors: {}, summary: said.trouble });
      return;
    }
    showAll(form, said.errors, touched);
    const other = Object.keys(said.errors).filter((name) => name !== "__all__" && !touched.has(name));
    const general = said.errors.__all__ || [];
    then({ ...said, summary: general.join(" ") || (other.length ? "" : said.summary) });
  }
  form.addEventListener("input", (event) => {
    touched.add(event.target.name);
    clearTimeout(timer);
    timer = setTimeout(check, PAUSE_MS);
  });
  check();
  return check;
}
