// What is known, put together from the events.

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

/** The names of what has changed. */
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

/** Times of failures are those at which this page heard of them. */
function read(name, row, before, at) {
  const pod = { name };
  fields.forEach((field, index) => (pod[field] = row[index]));
  const more = before ? pod.failed - before.failed : 0;
  const recent = (before?.failures ?? []).filter((failure) => failure.at > at - MEMORY);
  pod.failures = more > 0 ? [...recent, { at, number: more }] : recent;
  return pod;
}

/** The points of the last so many seconds. */
export const recent = (span) => state.points.filter((point) => point.t > state.at - span);

export const sum = (items, value) => items.reduce((total, item) => total + (value(item) ?? 0), 0);
