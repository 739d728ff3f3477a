// The state of the page, built from the events.

import { natural } from "./format.js";

const KEPT_POINTS = 180;
const MEMORY = 60; // seconds in which failures are recent

export const state = {
  at: 0,
  pods: new Map(),
  points: [],
  about: null,
  queues: null,
  scaling: [],
  shadows: [],
  heat: null,
};

let fields = [];

/** Apply an event. Return the names of the parts that changed. */
export function take(name, data) {
  const { at, fields: named, pods, point, points, ...panels } = data;
  state.at = at;
  if (named) fields = named;
  if (name === "all") for (const known of state.pods.keys()) if (!(known in pods)) state.pods.delete(known);
  for (const [pod, row] of Object.entries(pods ?? {})) {
    if (row === null) state.pods.delete(pod);
    else state.pods.set(pod, read(pod, row, state.pods.get(pod), at));
  }
  if (points) state.points = points;
  if (point) state.points = [...state.points.slice(1 - KEPT_POINTS), point];
  Object.assign(state, panels);
  const changed = new Set(Object.keys(panels));
  if (pods) changed.add("pods");
  if (point || points) changed.add("points");
  return changed;
}

/** Times of failures are the times at which this page received their counts. */
function read(name, row, before, at) {
  const pod = { name };
  fields.forEach((field, index) => (pod[field] = row[index]));
  const more = before ? pod.failed - before.failed : 0;
  const recent = (before?.failures ?? []).filter((failure) => failure.at > at - MEMORY);
  pod.failures = more > 0 ? [...recent, { at, number: more }] : recent;
  return pod;
}

/** One object per pod. Data-parallel ranks are joined into their pod, with sums, and stay in its `ranks`. */
export function pods() {
  const found = new Map();
  for (const endpoint of state.pods.values()) {
    const name = endpoint.rankOf ?? endpoint.name;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push(endpoint);
  }
  return [...found].map(([name, ranks]) => (ranks[0].rankOf ? joined(name, ranks) : ranks[0]));
}

const BEST = ["ready", "starting", "draining", "ejected"];

/** A pod is ready while one of its ranks is. */
function joined(name, ranks) {
  const best = ranks.reduce((one, other) => (BEST.indexOf(other.state) < BEST.indexOf(one.state) ? other : one));
  const pod = { ...best, name, rankOf: null, ranks: ranks.sort((one, other) => natural(one.name, other.name)) };
  for (const key of ["requests", "tokens", "waiting", "running", "sent", "failed"]) pod[key] = sum(ranks, (rank) => rank[key]);
  for (const key of ["kv", "prefill", "perToken"]) {
    const known = ranks.filter((rank) => rank[key] !== null);
    pod[key] = known.length ? sum(known, (rank) => rank[key]) / known.length : null;
  }
  return pod;
}

/** The points of the last so many seconds. */
export const recent = (span) => state.points.filter((point) => point.t > state.at - span);

export const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);
