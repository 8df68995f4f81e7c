// Beside a class or mapping form: errors while one types, the last hour re-judged, and the newest requests simulated.

import { answerOf, liveCheck } from "../check.js";
import { refresh } from "../base.js";
import { LiveTopic } from "../live.js";
import { ENDED, isEnded } from "../session.js";

const GIVE_UP_MS = 30_000; // the worker itself gives up after ten seconds
const pane = document.querySelector("[data-preview]");
const form = document.querySelector("form[data-preview-at]");
const find = (name) => pane.querySelector(`[data-${name}]`);
const running = { slug: "", timer: 0, topic: null };

liveCheck(form, form.dataset.previewAt, (said) => {
  if (said.trouble) return find("judged").replaceChildren(banner(said.trouble)); // figures of an earlier edit would mislead
  if (!said.html) return undefined;
  find("judged").innerHTML = said.html; // our own template, everything in it escaped
  return refresh(pane);
});

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
  find("simulated").replaceChildren(banner(text));
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
  if (!answer.ok) return say("The result could not be fetched. Try again.");
  find("simulated").innerHTML = await answer.text();
  return refresh(pane);
}

function hear(each) {
  if (!running.slug || each.slug !== running.slug) return;
  if (each.state === "queued" || each.state === "running") progress(each.progress, each.step || "Waits for the worker");
  else ended(each.slug);
}

async function simulate() {
  find("simulate").disabled = true;
  find("simulated").replaceChildren();
  const body = new FormData(form);
  body.set("simulate", "1");
  let said;
  try {
    const head = { accept: "application/json" };
    said = await answerOf(await fetch(form.dataset.previewAt, { method: "POST", body, headers: head, redirect: "manual" }));
  } catch {
    said = { refused: "The console does not answer." };
  }
  if (!said.slug) {
    find("simulate").disabled = false;
    say(said.refused || said.trouble || "Correct the marked fields first.");
    return;
  }
  running.slug = said.slug;
  find("running").hidden = false;
  progress(0, "Waits for the worker");
  running.timer = setTimeout(() => {
    end();
    say("The worker does not answer. Is the process analysis running?");
  }, GIVE_UP_MS);
  if (!running.topic) running.topic = new LiveTopic("experiments", { data: (data) => data.experiments.forEach(hear), state: () => {} });
  else running.topic.refetch();
}

find("simulate").addEventListener("click", simulate);
