// How many pods the autoscaler wants, and why.

import { $, h, hint, replace, table } from "./dom.js";
import { count } from "./format.js";
import { state } from "./state.js";

export function scaling() {
  const pools = state.scaling ?? [];
  if (!pools.length) return replace($("scaling-list"), hint("No pool has a policy. With ", h("code", {}, "autoscale"), " in the configuration, this says how many pods there should be, as a dry run first."));
  return replace($("scaling-list"), ...pools.map(ofPool));
}

function ofPool({ pool, paused, valid, mode, panic, gated, over_budget: overBudget, total, coordination, roles }) {
  if (!roles) return h("p", {}, `${pool}: no decision yet.`);
  const marks = [
    mode === "active" ? "acts" : "says what it would do",
    paused && "paused",
    !valid && "nothing can be seen: the last values hold",
    panic && "panic: grows fast, does not shrink",
    gated && "waits for pods that start",
    overBudget && "over the budget of GPUs",
    ...coordination.reasons,
  ].filter(Boolean);
  const rows = Object.entries(roles).map(([name, role]) => ({
    properties: { "data-tone": role.desired === role.current ? "ok" : "warn" },
    cells: [name, count(role.current), h("strong", {}, `${arrow(role)} ${count(role.desired)}`), `${role.min}–${role.max}`, signals(role)],
  }));
  const sum = total.raw === null ? "" : ` Load asks for ${count(total.raw)} in all, limits leave ${count(total.corrected)}.`;
  return h("div", {}, h("p", {}, h("strong", {}, pool), `: ${marks.join("; ")}.${sum}`), table({ caption: `Pods of pool ${pool}`, columns: ["Role", "Are", "Should be", "Limits", "Because of"], rows, numbers: [1, 2] }));
}

const arrow = ({ current, desired }) => (desired > current ? "▲" : desired < current ? "▼" : "=");

function signals({ signals: seen, missing, overridden }) {
  const known = Object.entries(seen).map(([name, value]) => `${name} ${typeof value === "number" ? count(value) : value}`);
  return [overridden && "an operator's order", ...known, ...missing.map((name) => `${name} unknown`)].filter(Boolean).join(", ");
}
