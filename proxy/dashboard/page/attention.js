// The first thing that is read: what is wrong, how much, and where to look.

import { $, h, replace, text } from "./dom.js";
import { count, percent, plural, seconds } from "./format.js";
import { order } from "./health.js";
import { recent, state, sum } from "./state.js";

const NOTABLE_FAILURES = 0.005;
const NOTABLE_GAP = 0.15; // of predicted and seen hit rates
const SLOWED = 2;
const LEAST_TTFT = 0.2;
const MINUTE = 60;

/** `fleet` are {pod, found} for every pod; `show(names)` makes the fleet map show these. */
export function attention(fleet, show) {
  const findings = [...ofFleet(fleet, show), ...ofTraffic(), ...ofQueues(), ...ofTheRest()];
  findings.sort((one, other) => order(one.tone) - order(other.tone));
  const serious = findings.filter((finding) => finding.tone !== "idle").length;
  const ready = fleet.filter(({ pod }) => pod.state === "ready").length;
  const well = ready ? `All is well: ${plural(ready, "pod")} ready` : "Nothing to report";
  text($("attention-title"), serious ? `${plural(serious, "thing")} to look at` : well);
  $("attention").dataset.tone = findings[0]?.tone ?? "ok";
  const lines = findings.map(line);
  const key = lines.map((item) => item.textContent).join("\n");
  if ($("findings").dataset.shown === key) return;
  $("findings").dataset.shown = key;
  replace($("findings"), ...lines);
}

const WORDS = { bad: "Sick", warn: "Watch", idle: "Note" };

function line({ tone, text: words, action }) {
  return h("li", { "data-tone": tone }, h("strong", { class: "tag" }, WORDS[tone]), h("span", {}, words), action ?? null);
}

const HEADINGS = {
  ejected: (pods) => `${pods} without requests`,
  breaker: (pods) => `${pods} with a breaker that is not closed`,
  doubts: (pods) => `${pods} in doubt, and asked all the same`,
  failing: (pods) => `${pods} with failures in the last minute`,
  stale: (pods) => `${pods} silent`,
  slow: (pods) => `${pods} slower than the others`,
  full: (pods) => `${pods} with a full KV cache`,
  draining: (pods) => `${pods} draining`,
  starting: (pods) => `${pods} starting`,
};

/** One line for each kind of trouble, however many pods have it. */
function ofFleet(fleet, show) {
  const kinds = new Map();
  for (const { pod, found } of fleet)
    for (const one of found) kinds.set(one.kind, [...(kinds.get(one.kind) ?? []), { ...one, name: pod.name }]);
  const lines = [...kinds].map(([kind, cases]) => {
    const names = cases.map((one) => one.name);
    const few = cases.length === 1 ? `${names[0]} ${cases[0].text}` : null;
    const many = `${HEADINGS[kind](plural(names.length, "pod"))}: ${names.slice(0, 4).join(", ")}${names.length > 4 ? ", …" : ""}`;
    const label = `Show ${names.length === 1 ? names[0] : `these ${names.length} pods`}`;
    const action = h("button", { type: "button", "data-key": `show-${kind}`, onclick: () => show(names) }, label);
    return { tone: cases[0].tone, text: few ?? many, action };
  });
  if (state.about?.panics)
    lines.unshift({ tone: "bad", text: "So many pods are in doubt that doubts are ignored: all that answer are asked." });
  if (fleet.length && !fleet.some(({ pod }) => pod.state === "ready"))
    lines.unshift({ tone: "bad", text: "No pod is ready: requests are refused with 503." });
  if (!fleet.length) lines.unshift({ tone: "bad", text: "No pod is known. Add one to the configuration, or with POST /admin/pods." });
  return lines;
}

function ofTraffic() {
  const points = recent(MINUTE), lines = [];
  const number = (key) => sum(points, (point) => point[key] * point.seconds);
  const failed = number("failed"), all = number("good") + failed + number("refused") + number("gone");
  if (failed && failed / all > NOTABLE_FAILURES)
    lines.push({ tone: "bad", text: `${percent(failed / all)} of the requests of the last minute failed (${count(Math.round(failed))}): pods answered with errors, broke off or were too slow.` });
  const refusals = {};
  for (const point of points)
    for (const [reason, times] of Object.entries(point.refusals)) refusals[reason] = (refusals[reason] ?? 0) + times;
  for (const [reason, times] of Object.entries(refusals))
    lines.push({ tone: "warn", text: `${count(times)} refused in the last minute: ${reason}.` });
  const now = middle(points.map((point) => point.ttft?.[1])), before = middle(state.points.map((point) => point.ttft?.[1]));
  if (now > LEAST_TTFT && before && now > SLOWED * before)
    lines.push({ tone: "warn", text: `TTFT has gone up: p90 is ${seconds(now)}, against ${seconds(before)} in the last quarter of an hour.` });
  const predicted = middle(points.map((point) => point.predicted)), actual = middle(points.map((point) => point.actual));
  if (predicted !== null && actual !== null && Math.abs(predicted - actual) > NOTABLE_GAP)
    lines.push({ tone: "warn", text: `Cache hits are not as predicted: ${percent(actual)} seen, ${percent(predicted)} expected.` });
  return lines;
}

function ofQueues() {
  return (state.queues ?? []).flatMap(({ pool, bands }) => {
    const waiting = sum(bands, (band) => band.waiting);
    if (!waiting) return [];
    const oldest = Math.max(0, ...bands.flatMap((band) => band.tenants.map((tenant) => tenant.oldest)));
    const parts = bands.filter((band) => band.waiting).map((band) => `${band.waiting} ${band.name}`);
    const where = state.queues.length > 1 ? ` for pool ${pool}` : "";
    return [{ tone: oldest > 1 ? "warn" : "idle", text: `${plural(waiting, "request")} in kvlane's queue${where} (${parts.join(", ")}), the oldest for ${seconds(oldest)}: pods have no room.` }];
  });
}

function ofTheRest() {
  const lines = [];
  for (const { pool, roles, paused } of state.scaling)
    for (const [name, role] of Object.entries(roles ?? {}))
      if (role.desired !== null && role.current !== null && role.desired > role.current)
        lines.push({ tone: "idle", text: `${pool}/${name} should have ${role.desired} pods, and has ${role.current}${paused ? " (scaling is paused)" : ""}.` });
  const waits = state.about?.config?.needsRestart ?? [];
  if (waits.length) lines.push({ tone: "warn", text: `Changed, but in effect after a restart only: ${waits.join(", ")}.` });
  if (state.about?.stopping) lines.push({ tone: "warn", text: "This kvlane is being stopped: no new requests are wanted." });
  return lines;
}

function middle(values) {
  const known = values.filter((value) => value !== null && value !== undefined).sort((one, other) => one - other);
  return known.length ? known[Math.floor(known.length / 2)] : null;
}
