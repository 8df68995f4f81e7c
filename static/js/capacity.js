// Whether new requests find an engine, in words. Without one they are refused or wait, and no waiting request starts.

const NAMED = 5;

function names(models) {
  const more = models.length - NAMED;
  const shown = models.slice(0, NAMED).join(", ");
  return more > 0 ? `${shown} and ${more} more` : shown;
}

/**
 * `capacity`: by model "up", "undecoded", "coming", "on_demand" or "none" (console/live/queue_view.py), empty if unknown. Returns `text`: the
 * problem, "" if there is none; `unserved`: no model has an engine; `idle`: why a queue may be empty.
 */
export function capacityWords(capacity) {
  const models = Object.keys(capacity);
  const of = (state) => models.filter((model) => capacity[model] === state);
  const [up, undecoded, coming, demand, none] = ["up", "undecoded", "coming", "on_demand", "none"].map(of);
  const said = [];
  if (none.length) said.push(`No engine for ${names(none)} is up or starting. Requests for ${none.length > 1 ? "these models" : "this model"} are refused immediately (503, no_capacity).`);
  if (coming.length) {
    said.push(`No engine for ${names(coming)} is up yet, but one is starting or asleep. Requests wait here for it, or are refused if their waiting time is too short.`);
  }
  if (demand.length) {
    const those = demand.length > 1 ? "these models" : "this model";
    said.push(`No engine for ${names(demand)} is up. The next request for ${those} has one started and waits here for it, as long as its waiting time allows.`);
  }
  if (undecoded.length) {
    said.push(`No decode engine for ${names(undecoded)} is up, only prefill engines. Requests are prefilled, then wait outside this queue for a decode engine and are refused after their waiting time, or 30 seconds.`);
  }
  const some = up.length < models.length ? ` for ${names(up)}` : "";
  const idle = up.length ? `Requests${some} go straight to an engine while the fleet has capacity.` : "";
  return { text: said.join(" "), unserved: models.length > 0 && up.length === 0, idle };
}
