// Whether engines take what comes, in words: where none does, requests are refused or wait, and nothing that waits starts.

const NAMED = 5;

function names(models) {
  const more = models.length - NAMED;
  const shown = models.slice(0, NAMED).join(", ");
  return more > 0 ? `${shown} and ${more} more` : shown;
}

/**
 * `capacity`: by model up, undecoded, coming or none (console/live/queue_view.py), empty where it is not known. `text`: what is wrong, ""
 * for nothing; `nobody`: no model has an engine; `idle`: what is true of an empty queue.
 */
export function capacityWords(capacity) {
  const models = Object.keys(capacity);
  const of = (state) => models.filter((model) => capacity[model] === state);
  const [up, undecoded, coming, none] = ["up", "undecoded", "coming", "none"].map(of);
  const said = [];
  if (none.length) said.push(`No engine of ${names(none)} is up or on its way: what arrives for ${none.length > 1 ? "them" : "it"} is refused at once (503, no_capacity).`);
  if (coming.length) {
    said.push(`No engine of ${names(coming)} is up, but one is asleep or on its way: what arrives waits here for it, or is refused where it may not wait so long.`);
  }
  if (undecoded.length) {
    said.push(`Of ${names(undecoded)} engines that prefill are up, but none that decodes: what arrives is computed, waits for one (not here: its prompt is sent) and is refused after its waiting time, or half a minute.`);
  }
  const some = up.length < models.length ? ` of ${names(up)}` : "";
  const idle = up.length ? `Requests${some} go to an engine as soon as they arrive while the fleet has room.` : "";
  return { text: said.join(" "), nobody: models.length > 0 && up.length === 0, idle };
}
