// What is known of the start of a request that waits, in words: when its turn comes, or why that is not known, and when it
// gives up where that may come first.

import { ms } from "./format.js";

/** `row` as of console/live/queue_view.py; `now` in epoch seconds. Two texts, and whether it will or may miss. */
export function startWords(row, now) {
  const end = row.gives_up_at;
  const ends = end === undefined ? "" : end > now ? `gives up in ${ms(end - now)}` : "gives up now";
  if (row.paused) return { text: "", ends, late: false };
  if (row.hopeless) return { text: "too late", ends, late: true };
  if (row.start_at === null) return { text: "not known", ends, late: false };
  const never = end !== undefined && row.start_at > end;
  return { text: `in ${ms(Math.max(0, row.start_at - now))}`, ends: never ? ends : "", late: never || row.start_at > row.due_at };
}
