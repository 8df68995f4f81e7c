// Whether anybody still is signed in here: of an answer to a script, or asked.

export const ENDED = "Your session has ended. Sign in again.";

/** The way to the login, which a script must not follow: ask with `redirect: "manual"`. */
export const isEnded = (answer) => answer.type === "opaqueredirect";

/** For a connection that was refused, which looks to a script as if the console were away. */
export async function hasEnded() {
  try {
    const answer = await fetch("/session/", { redirect: "manual" });
    return isEnded(answer) || answer.status === 403;
  } catch {
    return false;
  }
}
