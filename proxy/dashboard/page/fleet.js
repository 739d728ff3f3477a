// The fleet map: a tile for each pod, or a row of a list; the more pods, the smaller the tiles.

import { $, attribute, h, text } from "./dom.js";
import { count, natural, percent, plural, seconds } from "./format.js";
import { assess, order, tone } from "./health.js";
import { showPod } from "./pod.js";
import { state } from "./state.js";

const CARDS = 24; // pods that are shown as cards; beyond these there are fewer words, and beyond DENSE none
const DENSE = 120;

export const SIGNS = { ready: "●", starting: "◌", draining: "▽", ejected: "✕" };

const view = { filter: "", sort: "trouble", sick: false, list: false, names: null, opened: new Set() };
const tiles = new Map();
let shown = [];

/** Only these, until the filter is changed. */
export function show(names) {
  Object.assign(view, { filter: "", names: new Set(names), sick: false });
  $("fleet-filter").value = "";
  $("fleet-sick").checked = false;
  fleet(assess());
  $("fleet").scrollIntoView();
  $("fleet").focus({ preventScroll: true });
}

export function listen() {
  const change = (key, value) => {
    Object.assign(view, { [key]: value, names: null });
    fleet(assess());
  };
  $("fleet-filter").addEventListener("input", (event) => change("filter", event.target.value.toLowerCase()));
  $("fleet-sort").addEventListener("change", (event) => change("sort", event.target.value));
  $("fleet-sick").addEventListener("change", (event) => change("sick", event.target.checked));
  $("fleet-list").addEventListener("click", () => change("list", !view.list));
}

export function fleet(all) {
  const wanted = all.filter(matches).sort(SORTS[view.sort]);
  const some = wanted.length < all.length ? `${wanted.length} of ` : "";
  text($("fleet-count"), `${some}${plural(all.length, "pod")}`);
  attribute($("fleet-list"), "aria-pressed", view.list);
  const size = view.list ? "list" : all.length <= CARDS ? "cards" : all.length <= DENSE ? "compact" : "dense";
  attribute($("pods"), "data-size", size);
  text($("fleet-legend"), legend(all.length, wanted.length, size));
  (view.list ? asList : asTiles)(wanted, size);
}

function legend(all, wanted, size) {
  if (!all) return "Pods come from the section pods of the configuration, or by POST /admin/pods with the url of each.";
  if (!wanted) return "No pod is like that.";
  return view.list ? "" : LEGENDS[size];
}

const LEGENDS = {
  cards: "",
  compact: "Number: requests in flight, and + those that wait at the pod. Bar: KV cache in use.",
  dense: "Number: requests in flight. Height of the filling: KV cache in use. Marked corner: sick; dashed: no new requests.",
};

function matches({ pod, found }) {
  if (view.names && !view.names.has(pod.name)) return false;
  if (view.sick && !found.length) return false;
  const names = [pod, ...(pod.ranks ?? [])].map((one) => one.name).join(" ");
  return !view.filter || `${names} ${pod.role} ${pod.pool} ${pod.state} ${found.map((one) => one.text).join(" ")}`.toLowerCase().includes(view.filter);
}

const byName = (one, other) => natural(one.pod.name, other.pod.name);
const most = (key) => (one, other) => other.pod[key] - one.pod[key] || byName(one, other);

const SORTS = {
  trouble: (one, other) => order(tone(one.found)) - order(tone(other.found)) || byName(one, other),
  name: byName,
  requests: most("requests"),
  waiting: most("waiting"),
  kv: most("kv"),
  role: (one, other) => natural(`${one.pod.pool} ${one.pod.role}`, `${other.pod.pool} ${other.pod.role}`) || byName(one, other),
};

/** Tiles keep their elements; only tiles with another position are moved. */
function asTiles(wanted, size) {
  const box = $("pods");
  if (box.dataset.view !== size) {
    tiles.clear();
    box.replaceChildren();
  }
  box.dataset.view = size;
  shown = wanted.map(({ pod, found }) => {
    const tile = tiles.get(pod.name) ?? makeTile(pod.name, size);
    fill(tile, pod, found);
    return tile.element;
  });
  shown.forEach((element, index) => box.children[index] !== element && box.insertBefore(element, box.children[index] ?? null));
  while (box.children.length > shown.length) box.lastChild.remove();
  const names = new Set(wanted.map(({ pod }) => pod.name));
  for (const name of tiles.keys()) if (!names.has(name)) tiles.delete(name);
}

/** A dense tile has a number and a filling, and the rest in its label, so that 500 tiles are cheap. */
function makeTile(name, size) {
  const part = (className) => h("span", { class: className });
  const press = { type: "button", class: "tile", "data-key": `pod-${name}`, onclick: () => showPod(name) };
  if (size === "dense") {
    const parts = { number: part("number"), bar: part("fill") };
    return kept(name, { element: h("button", press, parts.bar, parts.number), parts, upright: true, words: "aria-label" });
  }
  const parts = { sign: part("sign"), state: part("hidden"), role: part("role"), number: part("number"), waiting: part("waiting"), pace: part("pace"), why: part("why"), bar: part("fill") };
  const element = h(
    "button",
    press,
    h("span", { class: "name" }, parts.sign, h("span", { class: "label" }, name), " ", parts.state, " ", parts.role),
    h("span", { class: "load" }, parts.number, " ", h("span", { class: "unit" }, "in flight"), " ", parts.waiting, " ", parts.pace),
    h("span", { class: "meter" }, parts.bar),
    parts.why,
  );
  return kept(name, { element, parts, upright: false, words: "title" });
}

function kept(name, tile) {
  tiles.set(name, tile);
  return tile;
}

function fill({ element, parts, upright, words }, pod, found) {
  text(parts.number, String(pod.requests));
  attribute(element, "data-tone", tone(found));
  attribute(element, "data-state", pod.state);
  const used = Math.min(1, pod.kv).toFixed(2), scale = upright ? `1 ${used}` : `${used} 1`;
  if (parts.bar.style.scale !== scale) parts.bar.style.scale = scale;
  const seen = upright ? `${pod.name} ${pod.requests} in flight, ${pod.waiting} queued, KV ${percent(pod.kv)}` : pod.name;
  attribute(element, words, [seen, ranks(pod), pod.state, ...found.map((one) => one.text)].filter(Boolean).join(", "));
  if (upright) return;
  text(parts.state, pod.state);
  attribute(parts.sign, "data-sign", SIGNS[pod.state]);
  text(parts.role, [pod.role, ranks(pod)].filter(Boolean).join(" · "));
  text(parts.waiting, pod.waiting ? `+${pod.waiting} queued` : "");
  text(parts.pace, `KV ${percent(pod.kv)}`);
  text(parts.why, found.length ? found[0].text : pod.perToken ? `${seconds(pod.perToken)} a token` : "");
}

const ranks = (pod) => (pod.ranks ? plural(pod.ranks.length, "rank") : "");

const COLUMNS = [
  ["name", "Pod"], ["role", "Pool / role"], ["trouble", "State"], ["requests", "In flight"], ["waiting", "Queued"], ["kv", "KV use"],
  [null, "Prompt"], [null, "Token"], [null, "Scraped"], [null, "Why"],
];
const NUMBERS = [3, 4, 5, 6, 7, 8];
const rows = new Map();

function asList(wanted) {
  const box = $("pods");
  if (box.dataset.view !== "list") {
    rows.clear();
    box.replaceChildren(h("table", {}, h("caption", { class: "hidden" }, "Pods"), h("thead", {}, h("tr", {}, COLUMNS.map(header))), h("tbody")));
  }
  box.dataset.view = "list";
  COLUMNS.forEach(([key], index) => key && attribute(box.querySelectorAll("th[scope=col]")[index], "aria-sort", view.sort === key ? (["name", "role", "trouble"].includes(key) ? "ascending" : "descending") : "none"));
  const body = box.querySelector("tbody");
  const lines = wanted.flatMap((one) => (view.opened.has(one.pod.name) ? [one, ...(one.ranks ?? [])] : [one]));
  lines.forEach(({ pod, found }, index) => {
    const { element, cells, toggle } = rows.get(rowOf(pod)) ?? makeRow(pod);
    cells.forEach((cell, place) => text(cell, CELLS[place](pod, found)));
    attribute(element, "data-tone", tone(found));
    if (toggle) {
      attribute(toggle, "aria-expanded", view.opened.has(pod.name));
      text(toggle, view.opened.has(pod.name) ? "▾" : "▸");
    }
    if (body.children[index] !== element) body.insertBefore(element, body.children[index] ?? null);
  });
  while (body.children.length > lines.length) body.lastChild.remove();
}

function header([key, label], index) {
  const choose = () => {
    view.sort = key;
    $("fleet-sort").value = key;
    fleet(assess());
  };
  return h("th", { scope: "col", class: NUMBERS.includes(index) ? "number" : null }, key ? h("button", { type: "button", class: "plain", onclick: choose }, label) : label);
}

const CELLS = [
  (pod) => pod.name,
  (pod) => [pod.pool, pod.role].filter(Boolean).join(" / "),
  (pod) => `${SIGNS[pod.state]} ${pod.state}${pod.breaker === "closed" ? "" : `, breaker ${pod.breaker}`}`,
  (pod) => count(pod.requests),
  (pod) => count(pod.waiting),
  (pod) => percent(pod.kv),
  (pod) => seconds(pod.prefill),
  (pod) => seconds(pod.perToken),
  (pod) => (pod.scrapedAt === null ? "never" : `${Math.max(0, Math.round(state.at - pod.scrapedAt))} s ago`),
  (pod, found) => found.map((one) => one.text).join("; "),
];

/** A pod whose ranks become known gets another row. */
const rowOf = (pod) => (pod.ranks ? `${pod.name} with ranks` : pod.name);

function makeRow(pod) {
  const cells = CELLS.map((_, index) =>
    index ? h("td", { class: NUMBERS.includes(index) ? "number" : null }) : h("button", { type: "button", class: "plain", onclick: () => showPod(pod.name) }),
  );
  const switched = () => {
    if (!view.opened.delete(pod.name)) view.opened.add(pod.name);
    fleet(assess());
  };
  const toggle = pod.ranks && h("button", { type: "button", class: "plain toggle", "data-key": `ranks-${pod.name}`, "aria-label": `Ranks of ${pod.name}`, onclick: switched });
  const element = h("tr", { "data-rank": pod.rankOf !== null }, h("th", { scope: "row" }, toggle, cells[0]), cells.slice(1));
  rows.set(rowOf(pod), { element, cells, toggle });
  return rows.get(rowOf(pod));
}
