// When a waiting request is expected to start, in words, and when it times out if that may come first.

import { ms } from "./format.js";

/** `row`: as in console/live/queue_view.py; `now`: epoch seconds. Two texts, and whether it will or may miss its target. */
export function startWords(row, now) {
  const end = row.gives_up_at;
  const ends = end === undefined ? "" : end > now ? `times out in ${ms(end - now)}` : "timing out";
  if (row.paused) return { text: "", ends, late: false };
  if (row.hopeless) return { text: "too late", ends, late: true };
  if (row.start_at === null) return { text: "unknown", ends, late: false };
  const never = end !== undefined && row.start_at > end;
  return { text: `in ${ms(Math.max(0, row.start_at - now))}`, ends: never ? ends : "", late: never || row.start_at > row.due_at };
}
