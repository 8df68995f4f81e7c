// Next to a form: live validation, the last hour against new targets (not of an ordering), and a simulation on demand.

import { answerOf, liveCheck } from "../check.js";
import { refresh } from "../base.js";
import { LiveTopic } from "../live.js";
import { ENDED, isEnded } from "../session.js";

const SILENT_MS = 30_000; // a worker that simulates tells its progress twice a second, and gives up by itself
const pane = document.querySelector("[data-preview]");
const form = document.querySelector("form[data-preview-at]");
const find = (name) => pane.querySelector(`[data-${name}]`);
const running = { slug: "", values: "", timer: 0, topic: null };
const EARLIER_JUDGED = "This preview is for earlier values. Correct the marked fields.";
const EARLIER_SIMULATED = "This simulation is for earlier values. Run it again for the current ones.";
let simulatedOf = null; // the values whose simulation is shown; null: none is

/** What is simulated: the form, and the model whose traffic it is, if there is a choice. */
function entered() {
  const data = new FormData(form);
  if (find("model")) data.set("model", find("model").value);
  return data;
}

const valuesNow = () => new URLSearchParams(entered()).toString();

liveCheck(form, form.dataset.previewAt, (said) => {
  if (!find("judged")) return undefined;
  if (said.trouble) return put("judged", banner(said.trouble)); // figures for an earlier edit would mislead
  if (!said.html) return wrong();
  put("judged");
  find("judged").innerHTML = said.html; // our own template, everything in it escaped
  return refresh(pane);
});

/** The form is invalid, so what is shown is for earlier values. */
function wrong() {
  if (find("judged").querySelector(".loading")) return put("judged", banner("Correct the marked fields first."));
  return outdate("judged", EARLIER_JUDGED);
}

function put(name, ...children) {
  find(name).classList.remove("earlier");
  find(name).replaceChildren(...children);
}

/** Dims a result and says that it is for earlier values; an empty text removes both. */
function outdate(name, text) {
  const holder = find(name);
  if (holder.classList.contains("earlier") === Boolean(text)) return;
  holder.classList.toggle("earlier", Boolean(text));
  if (text) holder.prepend(Object.assign(banner(text), { role: "status" }));
  else holder.firstElementChild.remove();
}

function compareWithForm() {
  if (simulatedOf !== null) outdate("simulated", simulatedOf === valuesNow() ? "" : EARLIER_SIMULATED);
}

form.addEventListener("input", compareWithForm);
find("model")?.addEventListener("input", compareWithForm);
form.addEventListener("click", compareWithForm); // levels of a mapping come and go by buttons

function banner(text) {
  return Object.assign(document.createElement("p"), { className: "banner stale", textContent: text });
}

function progress(share, step) {
  const meter = find("running").querySelector(".meter");
  meter.firstElementChild.dataset.share = String(share);
  meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
  find("step").textContent = step;
  refresh(pane);
}

function say(text) {
  simulatedOf = null;
  put("simulated", banner(text));
}

function end() {
  clearTimeout(running.timer);
  running.slug = "";
  find("running").hidden = true;
  find("simulate").disabled = false;
}

async function ended(slug) {
  end();
  const answer = await fetch(`/previews/${slug}/`, { redirect: "manual" });
  if (isEnded(answer)) return say(ENDED);
  if (!answer.ok) return say("Could not load the result. Try again.");
  put("simulated");
  find("simulated").innerHTML = await answer.text();
  simulatedOf = running.values;
  compareWithForm(); // the form may have changed in the meantime
  return refresh(pane);
}

function hear(each) {
  if (!running.slug || each.slug !== running.slug) return;
  if (each.state === "queued" || each.state === "running") {
    progress(each.progress, each.step || "Waiting for a worker");
    if (each.state === "running") awaitWord();
  } else ended(each.slug);
}

function awaitWord() {
  clearTimeout(running.timer);
  running.timer = setTimeout(() => {
    end();
    say("The worker is not responding. Check that the analysis process is running.");
  }, SILENT_MS);
}

async function simulate() {
  find("simulate").disabled = true;
  simulatedOf = null;
  put("simulated");
  running.values = valuesNow();
  const body = entered();
  body.set("simulate", "1");
  let said;
  try {
    const head = { accept: "application/json" };
    said = await answerOf(await fetch(form.dataset.previewAt, { method: "POST", body, headers: head, redirect: "manual" }));
  } catch {
    said = { refused: "The console is not responding." };
  }
  if (!said.slug) {
    find("simulate").disabled = false;
    say(said.refused || said.trouble || "Correct the marked fields first.");
    return;
  }
  running.slug = said.slug;
  find("running").hidden = false;
  progress(0, "Waiting for a worker");
  awaitWord();
  if (!running.topic) running.topic = new LiveTopic("experiments", { data: (data) => data.experiments.forEach(hear), state: () => {} });
  else running.topic.refetch();
}

find("simulate").addEventListener("click", simulate);
