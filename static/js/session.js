// Whether the session has ended: read from an answer to a script, or from the console.

export const ENDED = "Your session has ended. Sign in again.";

/** A redirect to the login page. Scripts must not follow it: fetch with `redirect: "manual"`. */
export const isEnded = (answer) => answer.type === "opaqueredirect";

/** Asks the console: a refused WebSocket handshake looks to a script like an unreachable console. */
export async function hasEnded() {
  try {
    const answer = await fetch("/session/", { redirect: "manual" });
    return isEnded(answer) || answer.status === 403;
  } catch {
    return false;
  }
}
