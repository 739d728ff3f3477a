// The six charts.

import { $ } from "./dom.js";
import { Chart } from "./chart.js";
import { count, percent, seconds } from "./format.js";
import { state } from "./state.js";

const percentiles = (key) => ["p50", "p90", "p99"].map((label, index) => ({ label, value: (point) => point[key]?.[index] ?? null }));
const rate = (value) => `${count(value)}${value === null ? "" : " /s"}`;

const charts = [
  new Chart({ title: "Time to first token", lines: percentiles("ttft"), write: seconds }),
  new Chart({ title: "Time per output token", lines: percentiles("tpot"), write: seconds }),
  new Chart({ title: "Whole request", lines: percentiles("e2e"), write: seconds }),
  new Chart({
    title: "Requests",
    lines: [
      { label: "answered", value: (point) => point.good },
      { label: "refused", value: (point) => point.refused },
      { label: "failed", value: (point) => point.failed },
    ],
    write: rate,
  }),
  new Chart({
    title: "Tokens",
    lines: [
      { label: "out", value: (point) => point.out },
      { label: "in", value: (point) => point.in },
    ],
    write: rate,
  }),
  new Chart({
    title: "Prompt tokens found in caches",
    lines: [
      { label: "found", value: (point) => point.hits },
      { label: "expected by kvlane", value: (point) => point.predicted },
    ],
    write: percent,
    most: 1,
  }),
];

export function trends() {
  if (!$("trends").childElementCount) $("trends").append(...charts.map((chart) => chart.element));
  for (const chart of charts) chart.show(state.points, state.at);
}
