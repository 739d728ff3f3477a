// A dozen numbers: how it is right now.

import { $, h, text, attribute } from "./dom.js";
import { count, percent, seconds } from "./format.js";
import { pods as known, recent, state, sum } from "./state.js";

const SPAN = 30; // seconds that "now" is taken from

const FIGURES = [
  ["Pods ready", (now) => `${now.ready.length} / ${now.pods.length}`, (now) => (!now.ready.length ? "bad" : now.ready.length < now.pods.length ? "warn" : "ok")],
  ["Requests", (now) => `${count(now.rate("good"))} /s`, null, (now) => (now.failing ? `${percent(now.failing)} failed` : "none failed")],
  ["In flight", (now) => count(sum(now.pods, (pod) => pod.requests)), null, (now) => `${count(now.perPod((pod) => pod.requests))} a pod`],
  ["Waiting at pods", (now) => count(sum(now.pods, (pod) => pod.waiting)), null, (now) => `${count(now.kvlane)} more in kvlane`],
  ["TTFT p50", (now) => seconds(now.percentile("ttft", 0)), null, (now) => `p90 ${seconds(now.percentile("ttft", 1))}`],
  ["Per token p50", (now) => seconds(now.percentile("tpot", 0)), null, (now) => `p90 ${seconds(now.percentile("tpot", 1))}`],
  ["Cache hits", (now) => percent(now.mean("hits")), null, (now) => `expected ${percent(now.mean("predicted"))}\n${from(now.last("hits")?.hitsFrom)}`],
  ["KV cache used", (now) => percent(now.perPod((pod) => pod.kv)), (now) => (now.fullest > 0.95 ? "warn" : "ok"), (now) => `fullest ${percent(now.fullest)}`],
  ["Tokens out", (now) => `${count(now.rate("out"))} /s`, null, (now) => `in ${count(now.rate("in"))} /s\n${from(now.last("out")?.tokensFrom)}`],
  ["A decision takes", (now) => seconds(now.percentile("decide", 0)), null, (now) => `p99 ${seconds(now.percentile("decide", 2))}`],
];

/** Pods count the tokens of all requests, responses only those of clients that ask for usage. */
const from = (source) => (source ? `from ${source}` : "no data");

const shown = [];

export function figures() {
  const now = present();
  if (!shown.length) make();
  FIGURES.forEach(([, value, tone, more], index) => {
    const [box, main, rest] = shown[index];
    text(main, value(now));
    text(rest, more ? more(now) : "");
    attribute(box, "data-tone", tone ? tone(now) : "ok");
  });
}

function make() {
  for (const [label] of FIGURES) {
    const main = h("dd", { class: "value" }), rest = h("dd", { class: "muted" });
    const box = h("div", {}, h("dt", {}, label), main, rest);
    shown.push([box, main, rest]);
    $("figures").append(box);
  }
}

function present() {
  const pods = known(), points = recent(SPAN);
  const ready = pods.filter((pod) => pod.state === "ready");
  const span = sum(points, (point) => point.seconds);
  const rate = (key) => (span ? sum(points, (point) => point[key] * point.seconds) / span : 0);
  const all = rate("good") + rate("failed");
  const having = (key) => points.filter((point) => point[key] !== null);
  return {
    pods,
    ready,
    rate,
    last: (key) => having(key).at(-1),
    failing: all ? rate("failed") / all : 0,
    kvlane: sum(state.queues ?? [], ({ bands }) => sum(bands, (band) => band.waiting)),
    fullest: [...state.pods.values()].reduce((most, { state, kv }) => (state === "ready" ? Math.max(most, kv) : most), 0),
    perPod: (value) => (ready.length ? sum(ready, value) / ready.length : 0),
    mean: (key) => (having(key).length ? sum(having(key), (point) => point[key]) / having(key).length : null),
    percentile: (key, index) => {
      const values = having(key).map((point) => point[key][index]).sort((one, other) => one - other);
      return values.length ? values[Math.floor(values.length / 2)] : null;
    },
  };
}
