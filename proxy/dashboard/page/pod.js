// One pod: what is known of it, what speaks against it, and its drain.

import { open, redraw } from "./dialog.js";
import { h, table } from "./dom.js";
import { showDecisionsOf } from "./decisions.js";
import { count, percent, seconds } from "./format.js";
import { paces, troubles } from "./health.js";
import { call } from "./session.js";
import { state } from "./state.js";

let more = null; // what /admin/pods/{name} says
let failure = "";

export function showPod(name) {
  more = null;
  failure = "";
  open(() => render(name));
  call(`/admin/pods/${encodeURIComponent(name)}`).then(learn, complain);
}

function learn(answer) {
  more = answer;
  redraw();
}

function complain(error) {
  failure = error.message;
  redraw();
}

function render(name) {
  const pod = state.pods.get(name);
  if (!pod) return { title: name, body: [h("p", {}, "This pod is gone.")] };
  const found = troubles(pod, paces(state.pods.values()));
  const why = found.length ? h("ul", { class: "whys" }, found.map((one) => h("li", { "data-tone": one.tone }, one.text))) : h("p", {}, "Nothing speaks against it.");
  return {
    title: name,
    body: [why, h("div", { class: "columns" }, facts(pod), about()), actions(pod), failure ? h("p", { role: "alert", class: "bad" }, failure) : null].filter(Boolean),
  };
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
    ["Legs sent / failed", `${count(pod.sent)} / ${count(pod.failed)}`],
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
    await call(`/admin/pods/${encodeURIComponent(pod.name)}/${drains ? "undrain" : "drain"}`, { method: "POST" }).then(learn, complain);
  };
  const words = drains ? "Take it back" : "Drain: no new requests";
  return h(
    "p",
    { class: "actions" },
    pod.leaving ? null : h("button", { type: "button", class: "primary", "data-key": "drain", onclick: act }, words),
    h("button", { type: "button", "data-key": "its-decisions", onclick: () => showDecisionsOf(pod.name) }, "Its decisions"),
    drains ? h("span", { class: "muted" }, pod.requests ? `${count(pod.requests)} requests still run there` : "Empty: it can be taken away") : null,
  );
}
