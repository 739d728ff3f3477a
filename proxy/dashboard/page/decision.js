// One decision, all of it: who could have been chosen, who was taken out, what each scorer said, what came of it.

import { open, redraw } from "./dialog.js";
import { h, table } from "./dom.js";
import { count, moment, percent, seconds } from "./format.js";
import { call } from "./session.js";

const MOST_ROWS = 20;

export function showDecision(id) {
  let body = [h("p", {}, "Looking…")], title = `Decision ${id}`;
  open(() => ({ title, body }));
  call(`/debug/decisions/${encodeURIComponent(id)}`)
    .then((decision) => {
      title = decision.pod === null ? "Nobody was chosen" : `Why ${decision.pod}?`;
      body = whole(decision);
    })
    .catch((error) => (body = [h("p", { role: "alert", class: "bad" }, error.message)]))
    .finally(redraw);
}

function whole(decision) {
  return [summary(decision), ...decision.profiles.map((profile) => ofProfile(profile, decision)), outOfQuestion(decision), legs(decision)].filter(Boolean);
}

function summary(one) {
  const words = [
    `${moment(one.at)}: ${one.path} for ${one.model}${one.tenant ? ` by ${one.tenant}` : ""}, ${count(one.promptTokens)} prompt tokens.`,
    `It waited ${seconds(one.waited)}${one.queued === null ? "" : ` (${seconds(one.queued)} for room)`}.`,
    one.error ? `Refused: ${one.error.message}` : `Answered by ${one.answeredBy ?? "nobody yet"}: ${one.stream ? "first token" : "not streamed, all of it"} after ${seconds(one.ttft)}${expected(one.predicted.ttft, (time) => (one.stream ? seconds(time) : `its first token after ${seconds(time)}`))}; ${count(one.cachedTokens)} tokens cached${expected(one.predicted.cachedTokens, count)}; ${one.outcome}${one.tries > 1 ? ` at try ${one.tries}` : ""}.`,
  ];
  return h("div", {}, words.map((word) => h("p", {}, word)), h("p", { class: "muted" }, "Request ", h("code", {}, one.request)));
}

const expected = (value, write) => (value === null ? "" : ` (expected ${write(value)})`);

/** The best ones first; of each scorer what it said, and what that came to with its weight. */
function ofProfile(profile, decision) {
  const then = new Map(decision.pods.map((pod) => [pod.pod, pod]));
  const names = profile.ranked.slice(0, MOST_ROWS);
  if (profile.picked && !names.includes(profile.picked)) names.push(profile.picked);
  const rows = names.map((name) => ({
    properties: { class: name === profile.picked ? "chosen" : null },
    cells: [
      h("span", {}, name, name === profile.picked ? h("strong", { class: "tag" }, "chosen") : null),
      ...profile.scorers.map((scorer) => score(scorer.scores[name])),
      profile.totals[name]?.toFixed(3) ?? "–",
      ...atThatTime(then.get(name)),
    ],
  }));
  const columns = ["Pod", ...profile.scorers.map((scorer) => `${scorer.name} × ${percent(scorer.share)}`), "Total", "In flight", "Queued", "KV", "Cached"];
  const heading = `Profile ${profile.profile}${profile.shadow ? " (shadow: only counted)" : ""}`;
  const margin = profile.margin === null ? "" : `${ahead(profile)} `;
  const cut = profile.ranked.length > MOST_ROWS ? `The best ${MOST_ROWS} of ${profile.ranked.length}. ` : "";
  const filters = profile.filters.filter((filter) => filter.removed.length).map((filter) => `${filter.name} took out ${some(filter.removed)}. `);
  return h("section", {}, h("h3", {}, heading), h("p", {}, margin, filters, cut, "In each cell: what the scorer said, and what it adds to the total."), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": heading }, table({ caption: heading, columns, rows, numbers: columns.map((_, index) => index).slice(1) })));
}

function ahead({ picked, runnerUp, margin }) {
  if (margin === 0) return `${picked} and ${runnerUp} were equal.`;
  return margin > 0 ? `${picked} was ahead of ${runnerUp} by ${margin.toFixed(3)}.` : `${picked} was taken though ${runnerUp} was ahead by ${(-margin).toFixed(3)}: its picker does not take the best.`;
}

function score(said) {
  if (!said) return "–";
  return h("span", {}, h("span", { class: "muted" }, `${said.raw.toFixed(2)} → `), said.weighted.toFixed(3));
}

const atThatTime = (pod) => (pod ? [count(pod.load.requests), count(pod.view.waiting), percent(pod.view.kvUsage), pod.hitTokens === null ? "–" : `${count(pod.hitTokens)} tokens`] : ["–", "–", "–", "–"]);

const some = (names) => names.slice(0, 8).join(", ") + (names.length > 8 ? ` and ${names.length - 8} more` : "");

function outOfQuestion({ absent }) {
  if (!absent.length) return null;
  const byWhy = {};
  for (const { pod, why } of absent) (byWhy[why] ??= []).push(pod);
  return h("section", {}, h("h3", {}, "Not among the candidates"), h("ul", {}, Object.entries(byWhy).map(([why, pods]) => h("li", {}, `${why}: ${some(pods)}`))));
}

function legs({ legs: all }) {
  if (!all.length) return null;
  const rows = all.map((leg) => ({
    cells: [`${leg.stage} ${leg.attempt + 1}`, leg.pod, seconds(leg.sent), seconds(leg.firstByte), seconds(leg.lastByte), leg.status ?? "–", leg.ending ?? "in flight", count(leg.cachedTokens), count(leg.completionTokens)],
  }));
  return h("section", {}, h("h3", {}, "Attempts"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Attempts" }, table({ caption: "Attempts; times after the request came", columns: ["Stage", "Pod", "Sent", "First byte", "Last byte", "Status", "Ending", "Cached", "Tokens out"], rows, numbers: [2, 3, 4, 7, 8] })));
}
