// Recent decisions: what was chosen, by how much, what was expected and what came; the whole table on click.

import { $, h, hint, replace, table } from "./dom.js";
import { clock, count, percent, seconds } from "./format.js";
import { showDecision } from "./decision.js";
import { call } from "./session.js";

const INTERVAL = 2000;
const SHOWN = 50;

let visible = false;
let busy = false;
let again = false; // something was typed while an answer was on its way

export function listen(isPaused) {
  new IntersectionObserver((entries) => {
    visible = entries.at(-1).isIntersecting;
    if (visible) look();
  }).observe($("decisions"));
  for (const id of ["decision-pod", "decision-request", "decision-slow"]) $(id).addEventListener("input", () => look());
  setInterval(() => visible && !isPaused() && !document.hidden && look(), INTERVAL);
}

export function showDecisionsOf(pod) {
  $("dialog").close();
  $("decision-pod").value = pod;
  $("decisions").scrollIntoView();
  $("decision-pod").focus({ preventScroll: true });
  look();
}

async function look() {
  if (busy) return void (again = true);
  busy = true;
  const wanted = new URLSearchParams({ limit: SHOWN });
  for (const key of ["pod", "request", "slow"]) if ($(`decision-${key}`).value) wanted.set(key, $(`decision-${key}`).value);
  try {
    draw(await call(`/debug/decisions?${wanted}`));
  } catch (error) {
    replace($("decision-list"), hint(error.status === 404 ? OFF : error.message));
  } finally {
    busy = false;
  }
  if (again) {
    again = false;
    look();
  }
}

const OFF = "Decisions are not kept. Set telemetry.decisions in the configuration, for instance {keep: 1000}, to see why each pod was chosen.";

function draw({ on, hint: why, decisions }) {
  const some = ["decision-pod", "decision-request", "decision-slow"].some((id) => $(id).value);
  if (!on && !decisions.length) return replace($("decision-list"), hint(why ?? OFF));
  if (!decisions.length) return replace($("decision-list"), hint(some ? "None of those that are kept is like that." : "No request has come yet."));
  const rows = decisions.map((one) => ({ properties: { "data-tone": tone(one) }, cells: CELLS.map(([, cell]) => cell(one)) }));
  return replace($("decision-list"), table({ caption: "Recent decisions, the latest first", columns: CELLS.map(([name]) => name), rows, numbers: [3, 4, 5, 6, 7] }));
}

const CELLS = [
  ["At", (one) => h("button", { type: "button", class: "plain", "data-key": `decision-${one.id}`, "aria-label": `decision of ${clock(one.at)} for ${one.pod ?? "nobody"}`, onclick: () => showDecision(one.id) }, clock(one.at))],
  ["Model", (one) => one.model + (one.tenant ? ` · ${one.tenant}` : "")],
  ["Chosen", (one) => (one.pod === null ? "nobody" : one.prefill ? `${one.prefill} → ${one.pod}` : one.pod) + (one.answeredBy && one.answeredBy !== one.pod ? `, answered by ${one.answeredBy}` : "")],
  ["Ahead by", (one) => (one.margin === null ? "–" : one.margin.toFixed(2))],
  ["Cached", (one) => `${percent(share(one.cachedTokens, one.promptTokens))} of ${count(one.promptTokens)}`],
  ["Waited", (one) => seconds(one.waited)],
  ["TTFT", (one) => (one.stream || one.ttft === null ? seconds(one.ttft) : `whole ${seconds(one.ttft)}`)],
  ["Expected", (one) => seconds(one.predicted.ttft)],
  ["Outcome", (one) => (one.outcome === "complete" && one.status < 400 ? "complete" : `${one.outcome}${one.status ? ` ${one.status}` : ""}`) + (one.tries > 1 ? `, ${one.tries} tries` : "")],
];

const share = (part, whole) => (part === null || !whole ? null : Math.min(1, part / whole));

const tone = (one) => (["complete", "in-flight", "client-gone"].includes(one.outcome) && !(one.status >= 500) ? (one.tries > 1 ? "warn" : "ok") : "bad");
