// The dialog of a pod or of one of its data-parallel ranks: state, troubles, and drain.

import { open, redraw } from "./dialog.js";
import { h, table } from "./dom.js";
import { showDecisionsOf } from "./decisions.js";
import { count, percent, seconds } from "./format.js";
import { assess } from "./health.js";
import { call } from "./session.js";
import { state } from "./state.js";

let more = null; // the response of /admin/pods/{name}
let failure = "";

export function showPod(name) {
  more = null;
  failure = "";
  open(() => render(name));
  const { pod } = find(name) ?? {};
  if (pod) call(path(names(pod)[0])).then(learn, complain);
}

const find = (name) => assess().flatMap((one) => [one, ...(one.ranks ?? [])]).find(({ pod }) => pod.name === name);

/** The pods of the admin API: ranks with a port each are pods of their own there. */
const names = (pod) => (pod.ranks && !pod.ranks[0].name.startsWith(`${pod.name}/`) ? pod.ranks.map((rank) => rank.name) : [pod.name]);

const path = (name, verb = "") => `/admin/pods/${encodeURIComponent(name)}${verb}`;

function learn(response) {
  more = response;
  redraw();
}

function complain(error) {
  failure = error.message;
  redraw();
}

function render(name) {
  const one = find(name);
  if (!one) return { title: name, body: [h("p", {}, "This pod is gone.")] };
  const { pod, found, ranks } = one;
  const why = found.length ? h("ul", { class: "whys" }, found.map((one) => h("li", { "data-tone": one.tone }, one.text))) : h("p", {}, "Nothing speaks against it.");
  return {
    title: name,
    body: [why, ranks ? listed(ranks) : null, h("div", { class: "columns" }, facts(pod), about()), actions(pod), failure ? h("p", { role: "alert", class: "bad" }, failure) : null].filter(Boolean),
  };
}

function listed(ranks) {
  const rows = ranks.map(({ pod, found }) => ({
    properties: { "data-tone": found[0]?.tone ?? "ok" },
    cells: [
      h("button", { type: "button", class: "plain", "data-key": `rank-${pod.name}`, onclick: () => showPod(pod.name) }, pod.name),
      pod.state, count(pod.requests), count(pod.waiting), percent(pod.kv), found.map((one) => one.text).join("; "),
    ],
  }));
  return table({ caption: "Data-parallel ranks", columns: ["Rank", "State", "In flight", "Queued", "KV use", "Why"], rows, numbers: [2, 3, 4] });
}

function facts(pod) {
  return pairs("Now", [
    ["State", pod.state],
    ["Breaker", pod.breaker],
    ["In flight by kvlane", `${count(pod.requests)}, ${count(pod.tokens)} uncached tokens`],
    ["Running / queued there", `${count(pod.running)} / ${count(pod.waiting)}`],
    ["KV cache", percent(pod.kv)],
    ["Last scrape", pod.scrapedAt === null ? "never" : `${Math.max(0, Math.round(state.at - pod.scrapedAt))} s ago`],
    ["A typical prompt", seconds(pod.prefill)],
    ["A token", seconds(pod.perToken)],
    ["Attempts sent / failed", `${count(pod.sent)} / ${count(pod.failed)}`],
  ]);
}

function about() {
  if (!more) return null;
  return pairs("Always", [
    ["URL", more.url],
    ["Pool / role", [more.pool, more.role].filter(Boolean).join(" / ")],
    ["Engine", more.engine],
    ["Models", (more.models ?? ["any"]).join(", ")],
    ["Labels", Object.entries(more.labels).map(([key, value]) => `${key}=${value}`).join(", ") || "none"],
    ["Weight", String(more.weight)],
    ["KV blocks", more.metrics ? `${count(more.metrics.blocks)} of ${more.metrics.blockSize} tokens` : "unknown"],
  ]);
}

const pairs = (caption, list) =>
  table({ caption, columns: [caption, ""], className: "pairs", rows: list.map(([key, value]) => ({ cells: [key, value] })) });

function actions(pod) {
  const drains = pod.state === "draining";
  const act = async () => {
    failure = "";
    for (const name of names(pod)) await call(path(name, drains ? "/undrain" : "/drain"), { method: "POST" }).then(learn, complain);
  };
  const words = drains ? "Take it back" : "Drain: no new requests";
  return h(
    "p",
    { class: "actions" },
    pod.leaving ? null : h("button", { type: "button", class: "primary", "data-key": "drain", onclick: act }, words),
    pod.ranks ? null : h("button", { type: "button", "data-key": "its-decisions", onclick: () => showDecisionsOf(pod.name) }, "Its decisions"),
    drains ? h("span", { class: "muted" }, pod.requests ? `${count(pod.requests)} requests still run there` : "Empty: it can be taken away") : null,
  );
}
