// The affinity map: a row for each beginning that prompts have in common, a column for each pod that answered them.

import { $, h, replace, text, hint } from "./dom.js";
import { bytes, count } from "./format.js";
import { state } from "./state.js";

const WORDY = 16; // columns up to which cells have numbers

export function heat() {
  const known = state.heat;
  text($("cache-size"), known ? `${count(known.blocks)} blocks known, ${bytes(known.bytes)}` : "");
  replace($("heat"), known?.groups.length ? map(known) : hint(known ? NOTHING : state.about?.workers > 1 ? APART : MISSING));
}

const NOTHING = "No prompts that begin alike were seen in the last minute. Conversations and shared documents or system prompts show here.";
const APART = "Nothing to show here: of several workers each one knows its own part.";
const MISSING = "Nothing to show here: no plugin knows which prompts begin alike. The approx-prefix-cache-producer does, which the default scheduling has; exact indexes (precise-prefix-cache-producer) know blocks, not groups.";

function map({ pods, groups, more }) {
  const hottest = Math.max(...groups.flatMap((group) => group.cells.map(([, heat]) => heat)));
  const head = h("tr", {}, h("th", { scope: "col" }, "Prefix"), h("th", { scope: "col" }, "Blocks"), pods.map((pod) => h("th", { scope: "col", class: "turned" }, h("span", {}, pod))));
  const rows = groups.map((group) => {
    const cells = new Map(group.cells);
    const name = h("th", { scope: "row" }, h("code", {}, group.key), group.first ? "" : h("span", { class: "muted" }, " start"));
    const where = h("td", { class: "number", title: `blocks ${group.first} to ${group.first + group.blocks} of the prompt` }, `${group.first}–${group.first + group.blocks}`);
    return h("tr", {}, name, where, pods.map((pod, index) => cell(cells.get(index), hottest, pods.length, pod)));
  });
  const caption = h("caption", { class: "hidden" }, "How often pods used what prompts have in common, lately");
  const rest = more > 0 ? h("p", { class: "muted" }, `and ${more} more pods`) : null;
  return h("div", {}, h("table", { class: "heat", "data-wordy": String(pods.length <= WORDY) }, caption, h("thead", {}, head), h("tbody", {}, rows)), rest ?? "");
}

function cell(heat, hottest, columns, pod) {
  if (!heat) return h("td", {});
  const element = h("td", { class: "hot", title: `${pod}: used ${heat.toFixed(1)} times of late` }, h("span", { class: columns > WORDY ? "hidden" : null }, heat < 1 ? "·" : String(Math.round(heat))));
  element.style.setProperty("--heat", `${Math.round(15 + 85 * Math.sqrt(heat / hottest))}%`);
  return element;
}
