// Date and time fields in the browser's time zone, with UTC beside them. Forms submit UTC, so that a shared link means the
// same time to everyone. Without script the fields and their labels are in UTC.

const MOMENTS = "input[data-moment]";
const MINUTE_MS = 60_000;
const NIGHT_MS = 180 * MINUTE_MS; // longer than any daylight-saving shift
const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;

/** By input: its local text and the UTC text it stands for. Local text alone is ambiguous for one hour a year. */
const known = new WeakMap();

const asUtc = (date) => date.toISOString().slice(0, 19);
const asLocal = (date) => asUtc(new Date(date.getTime() - date.getTimezoneOffset() * MINUTE_MS));
const whole = (text) => (text.length === 16 ? `${text}:00` : text.slice(0, 19));
const ofUtc = (text) => new Date(/(Z|[+-]\d\d:?\d\d)$/.test(text) ? text : `${text}Z`);
const sayable = (date) => date.getTime() >= 0 && date.getUTCFullYear() < 10_000; // false for an invalid date, too

/** The UTC text that an input stands for; its raw value if that is not a valid time. */
function meant(input) {
  const shown = known.get(input);
  if (shown?.local === whole(input.value)) return shown.utc;
  const date = new Date(input.value);
  return sayable(date) ? asUtc(date) : input.value;
}

/** The second occurrence of a local time on the day that clocks go back; null if it occurs once. */
function again(date) {
  const shift = new Date(date.getTime() + NIGHT_MS).getTimezoneOffset() - date.getTimezoneOffset();
  const later = new Date(date.getTime() + shift * MINUTE_MS);
  return shift > 0 && asLocal(later) === asLocal(date) ? later : null;
}

/** Shows UTC below the field; also which of two times is meant, or that clocks skip this one. */
function tell(input) {
  const note = document.getElementById(`${input.id}_utc`);
  if (!note || zone === "UTC") return;
  const date = ofUtc(meant(input));
  note.replaceChildren(input.value && sayable(date) ? `= ${asUtc(date).replace("T", " ")} UTC` : `in ${zone}`);
  note.classList.toggle("more", false);
  if (!input.value || !sayable(date)) return;
  const first = new Date(input.value);
  const second = again(first);
  if (second) {
    const isFirst = date.getTime() === first.getTime();
    const other = Object.assign(document.createElement("button"), {
      type: "button",
      className: "link-button",
      textContent: `Use the ${isFirst ? "second" : "first"}`,
    });
    other.addEventListener("click", () => {
      setMoment(input, isFirst ? second : first);
      input.focus();
    });
    note.append(`, the ${isFirst ? "first" : "second"} of two such times on that day. `, other);
  } else if (asLocal(date) !== whole(input.value)) {
    note.append(": clocks skip the entered time");
  }
  note.classList.toggle("more", note.childNodes.length > 1);
}

/** Sets a field, as if the time had been typed. */
export function setMoment(input, date) {
  known.set(input, { local: asLocal(date), utc: asUtc(date) });
  input.value = asLocal(date);
  tell(input);
  input.dispatchEvent(new Event("input", { bubbles: true }));
}

/** Converts every date and time field of `root` from UTC to local time. */
export function localMoments(root = document) {
  if (zone === "UTC") return;
  for (const input of root.querySelectorAll(`${MOMENTS}:not([data-local])`)) {
    input.dataset.local = "yes";
    const label = input.labels[0]?.firstChild;
    if (label) label.textContent = label.textContent.replace("(UTC)", "(your time)");
    input.setAttribute("aria-describedby", `${input.getAttribute("aria-describedby") || ""} ${input.id}_utc`.trim());
    const utc = input.getAttribute("value") || ""; // not `value`: the browser may have restored earlier input
    if (sayable(ofUtc(utc))) {
      known.set(input, { local: asLocal(ofUtc(utc)), utc });
      input.value = asLocal(ofUtc(utc));
    }
    input.addEventListener("input", () => tell(input));
    tell(input);
  }
}

// Fires however a form is submitted, by the user or by script.
document.addEventListener("formdata", ({ target, formData }) => {
  for (const input of target.elements) {
    const sent = input.matches(`${MOMENTS}[data-local]`) && input.value && formData.has(input.name);
    if (sent) formData.set(input.name, meant(input));
  }
});
