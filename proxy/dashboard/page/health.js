// What speaks against a pod, in words; and how bad that is.

import { percent, seconds } from "./format.js";
import { pods, state, sum } from "./state.js";

const SLOW = 2; // times the median of its role
const LEAST_SLOW = 0.05; // seconds of a prompt
const LEAST_SLOW_TOKEN = 0.005;
const FULL = 0.95;
const PATIENCE = 5; // seconds

const startingSince = new Map();

/** {pod, found} for every pod, and for pods with data-parallel ranks `ranks`: the same for each rank. */
export function assess() {
  const medians = paces(state.pods.values());
  const assessed = (pod) => ({ pod, found: troubles(pod, medians) });
  return pods().map((pod) => {
    const ranks = pod.ranks?.map(assessed);
    return ranks ? { pod, found: ofRanks(ranks), ranks } : assessed(pod);
  });
}

/** One line for each kind of trouble; it names the ranks, unless all ranks have it. */
function ofRanks(ranks) {
  const kinds = new Map();
  for (const { pod, found } of ranks)
    for (const one of found) kinds.set(one.kind, [...(kinds.get(one.kind) ?? []), { ...one, rank: pod.name.match(/\d*$/)[0] }]);
  const lines = [...kinds.values()].map((cases) => {
    const [worst] = cases.sort((one, other) => order(one.tone) - order(other.tone));
    const where = `rank${cases.length > 1 ? "s" : ""} ${cases.map((one) => one.rank).join(", ")}: `;
    return { ...worst, text: cases.length === ranks.length ? worst.text : where + worst.text };
  });
  return lines.sort((one, other) => order(one.tone) - order(other.tone));
}

/** [{tone: "bad" | "warn" | "idle", kind, text}], the worst first. */
function troubles(pod, medians) {
  const found = [];
  const add = (tone, kind, text) => found.push({ tone, kind, text });
  if (pod.state === "ejected") add("bad", "ejected", because("gets no requests", pod));
  else if (pod.doubts.length) add("warn", "doubts", `in doubt: ${pod.doubts.join(", ")}`);
  if (pod.breaker === "open") add("bad", "breaker", "breaker open: its last requests failed");
  else if (pod.breaker !== "closed") add("warn", "breaker", "breaker half open: it is being tried again");
  const failures = sum(pod.failures, (failure) => failure.number);
  if (failures) add("warn", "failing", `${failures} failed there in the last minute`);
  if (pod.scrapedAt === null && pod.state !== "starting") add("warn", "stale", `says nothing of its load${failure(pod)}`);
  else if (pod.stale && pod.state !== "starting")
    add("warn", "stale", `silent for ${seconds(Math.max(1, Math.round(state.at - pod.scrapedAt)))}: its load is guessed${failure(pod)}`);
  const slow = slowness(pod, medians);
  if (slow) add("warn", "slow", slow);
  if (pod.kv > FULL) add("warn", "full", `KV cache ${percent(pod.kv)} full: requests may be preempted`);
  if (pod.state === "draining") add("idle", "draining", pod.leaving ? "leaves when it is empty" : "drains: no new requests");
  if (waits(pod)) add("warn", "starting", `has never responded${failure(pod)}: kvlane doctor with its URL says why`);
  else if (pod.state === "starting") add("idle", "starting", "has not responded yet");
  return found.sort((one, other) => order(one.tone) - order(other.tone));
}

/** Whether it has been starting for longer than pods that are well do, as far as kvlane or this page has seen. */
function waits({ name, state: now, failingSince }) {
  if (now !== "starting") startingSince.delete(name);
  else if (!startingSince.has(name)) startingSince.set(name, failingSince ?? state.at);
  return state.at - startingSince.get(name) > PATIENCE;
}

export const tone = (found) => found[0]?.tone ?? "ok";

export const order = (tone) => ["bad", "warn", "idle", "ok"].indexOf(tone);

/** Of what is learnt of paces, by pool and role: pods of one kind are compared. */
function paces(pods) {
  const kinds = new Map();
  for (const pod of pods) {
    const kind = kinds.get(kindOf(pod)) ?? { prefill: [], perToken: [] };
    if (pod.prefill !== null) kind.prefill.push(pod.prefill);
    if (pod.perToken !== null) kind.perToken.push(pod.perToken);
    kinds.set(kindOf(pod), kind);
  }
  for (const kind of kinds.values()) {
    kind.prefill = median(kind.prefill);
    kind.perToken = median(kind.perToken);
  }
  return kinds;
}

function slowness(pod, medians) {
  const usual = medians.get(kindOf(pod)) ?? {};
  const prompt = times(pod.prefill, usual.prefill, LEAST_SLOW);
  const token = times(pod.perToken, usual.perToken, LEAST_SLOW_TOKEN);
  if (prompt) return `slow: a typical prompt takes ${seconds(pod.prefill)}, ${prompt} times the others`;
  return token ? `slow: a token takes ${seconds(pod.perToken)}, ${token} times the others` : null;
}

const times = (value, usual, least) =>
  value !== null && usual && value > SLOW * usual && value > least ? (value / usual).toFixed(1) : null;

const kindOf = (pod) => `${pod.pool} ${pod.role}`;

const because = (what, pod) => `${what}: ${pod.doubts.length ? pod.doubts.join(", ") : `it cannot be reached${failure(pod)}`}`;

/** Why its scrapes fail, and for how long they have. */
const failure = ({ scrapeFailure: why, failingSince: since }) =>
  why ? ` (${why} for ${seconds(Math.max(1, Math.round(state.at - since)))})` : "";

function median(values) {
  const sorted = values.sort((one, other) => one - other);
  return sorted.length > 1 ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
}
