// Formats numbers and times. The template filters in console/templatetags/units.py produce the same texts.

export const DASH = "–";
const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export function ms(seconds) {
  if (missing(seconds)) return DASH;
  const sign = seconds < 0 ? "−" : "";
  const size = Math.abs(seconds);
  if (size < 0.01) return `${sign}${(size * 1000).toFixed(1)} ms`;
  if (size < 0.9995) return `${sign}${Math.round(size * 1000)} ms`;
  if (size < 10) return `${sign}${size.toFixed(2)} s`;
  if (size < 120) return `${sign}${size.toFixed(1)} s`;
  return `${sign}${Math.round(size / 60)} min`;
}

export function percent(share, digits = 1) {
  if (missing(share)) return DASH;
  const text = (share * 100).toFixed(digits);
  return `${text.replace(/\.0+$/, "")} %`;
}

export function count(value) {
  return missing(value) ? DASH : Math.round(value).toLocaleString("en");
}

export function rate(value, unit = "/s") {
  if (missing(value)) return DASH;
  if (value > 0 && value < 0.05) return `<0.1${unit}`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en")}${unit}`;
}

export const tokensPerSecond = (value) => rate(value, " tok/s");

export function money(value) {
  return missing(value) ? DASH : value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 2 : 0 });
}

export function clock(date) {
  return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

const zoneOf = (date) => date.toLocaleTimeString("en", { timeZoneName: "short" }).split(" ").pop();

/** Shows every <time datetime> of `root` in local time, with UTC on hover: with its date where that is not today, and in
 * the form "full" always with date and zone. The sidebar names the zone of all others. */
export function localTimes(root = document) {
  for (const element of root.querySelectorAll("time[datetime]:not([data-local])")) {
    const date = new Date(element.dateTime);
    if (Number.isNaN(date.getTime())) continue;
    element.dataset.local = "yes";
    element.title = `${date.toISOString().replace("T", " ").slice(0, 19)} UTC`;
    const now = new Date();
    const year = now.getFullYear() === date.getFullYear() ? undefined : "numeric";
    const today = now.toDateString() === date.toDateString();
    const full = element.dataset.format === "full";
    const day = today && !full ? "" : `${date.toLocaleDateString([], { day: "numeric", month: "short", year })} `;
    element.textContent = element.dataset.format === "minute" ? `${day}${clock(date).slice(0, 5)}` : day + clock(date);
    if (full) element.textContent += ` ${zoneOf(date)}`;
  }
}

/** In the sidebar: the zone that the times of this page are in. */
export function nameZone(root = document) {
  for (const element of root.querySelectorAll("[data-zone]")) element.textContent = Intl.DateTimeFormat().resolvedOptions().timeZone;
}

export function timeElement(epochSeconds) {
  const element = document.createElement("time");
  element.dateTime = new Date(epochSeconds * 1000).toISOString();
  const holder = document.createElement("span");
  holder.append(element);
  localTimes(holder);
  return element;
}
