// The configuration in effect, and what another one would change: tried first, applied only then.

import { $, h, replace, text } from "./dom.js";
import { moment, plural } from "./format.js";
import { diff, excerpt } from "./diff.js";
import { call, request } from "./session.js";
import { state } from "./state.js";

const HIDDEN = "***";
let known = null; // the number of the version that is shown
let source = "";

const parts = {
  values: h("div", { class: "scroll values", tabindex: 0, role: "region", "aria-label": "Values in effect" }),
  defaults: h("input", { type: "checkbox" }),
  editor: h("textarea", { id: "editor", rows: 18, spellcheck: "false", autocomplete: "off" }),
  apply: h("button", { type: "button", disabled: true, onclick: () => propose(false) }, "Apply"),
  result: h("div", { role: "status" }),
};

export async function configuration() {
  const version = state.about?.config;
  if (!version || version.number === known) return;
  known = version.number;
  text($("configuration-version"), `version ${version.number} of ${moment(version.since)}, by ${version.origin}`);
  if (!$("configuration-body").childElementCount) build();
  await Promise.all([showValues(), loadSource()]);
}

function build() {
  parts.defaults.addEventListener("change", showValues);
  parts.editor.addEventListener("input", () => (parts.apply.disabled = true));
  replace(
    $("configuration-body"),
    h("details", {}, h("summary", {}, "Values in effect"), h("label", { class: "check" }, parts.defaults, " defaults too"), parts.values),
    h(
      "details",
      { id: "edit" },
      h("summary", {}, "Edit and try"),
      h("p", { class: "muted" }, "Nothing is changed by trying. Secrets are shown as ***; write them out, or as ${VARIABLE}, before you apply. What is applied here lasts until kvlane reads its file again."),
      h("label", { for: "editor" }, "YAML"),
      parts.editor,
      h("p", { class: "actions" }, h("button", { type: "button", class: "primary", id: "try", onclick: () => propose(true) }, "Dry run"), parts.apply, h("button", { type: "button", onclick: () => ((parts.editor.value = source), parts.result.replaceChildren()) }, "Start again")),
      parts.result,
    ),
  );
}

async function loadSource() {
  const untouched = parts.editor.value === source;
  const answer = await request("/admin/config/source");
  if (!answer.ok) return;
  source = await answer.text();
  if (untouched) parts.editor.value = source;
}

async function showValues() {
  const { version, ...sections } = await call("/admin/config");
  const lines = [];
  for (const [name, value] of Object.entries(sections)) collect(name, value, lines);
  const wanted = lines.filter(([, , origin]) => parts.defaults.checked || origin !== "default");
  const rows = wanted.map(([path, value, origin]) => h("div", {}, h("dt", {}, path), h("dd", {}, h("code", {}, value), origin === "file" ? "" : h("span", { class: "muted" }, ` ${origin}`))));
  replace(parts.values, h("dl", { class: "settings" }, rows));
}

/** [path, value, origin] of everything that has an origin. */
function collect(path, value, lines) {
  if (Array.isArray(value)) value.forEach((item, index) => collect(`${path}[${item?.name ?? item?.pluginRef ?? index}]`, item, lines));
  else if (value && typeof value === "object" && "origin" in value && "value" in value) lines.push([path, shown(value.value), value.origin]);
  else if (value && typeof value === "object") for (const [key, item] of Object.entries(value)) collect(`${path}.${key}`, item, lines);
}

function shown(value) {
  const names = Array.isArray(value) ? value.map((item) => item?.name) : [];
  if (!names.length || !names.every(Boolean)) return JSON.stringify(value);
  return names.slice(0, 6).join(", ") + (names.length > 6 ? `, … (${names.length})` : "");
}

async function propose(isDry) {
  const body = parts.editor.value;
  parts.apply.disabled = true;
  try {
    const answer = await call(`/admin/config?dry_run=${isDry ? 1 : 0}`, { method: "POST", body });
    const hasHidden = body.includes(HIDDEN);
    parts.apply.disabled = !isDry || !answer.changed.length || hasHidden;
    parts.result.replaceChildren(...(isDry ? tried(answer, body, hasHidden) : [h("p", { class: "ok" }, `In effect: version ${answer.number}.`)]));
  } catch (error) {
    const problems = error.problems?.length ? error.problems : [{ path: "", message: error.message }];
    parts.result.replaceChildren(h("p", { class: "bad" }, plural(problems.length, "fault"), "; nothing has changed."), h("ul", {}, problems.map((one) => h("li", {}, one.path ? h("code", {}, one.path) : null, one.path ? ": " : null, one.message))));
  }
}

function tried(answer, body, hasHidden) {
  if (!answer.changed.length) return [h("p", { class: "ok" }, "It is valid, and changes nothing.")];
  const lines = excerpt(diff(source, body)).map(([sign, line]) => h("span", { class: "line", "data-sign": sign }, `${sign === "=" ? " " : sign} ${line}\n`));
  return [
    h("p", { class: "ok" }, `It is valid, and changes ${plural(answer.changed.length, "value")}:`),
    h("ul", {}, answer.changed.map((path) => h("li", {}, h("code", {}, path), answer.needsRestart.includes(path) ? " (after a restart)" : null))),
    ...answer.warnings.map((one) => h("p", { class: "bad" }, `Warning: ${one}`)),
    lines.length ? h("pre", { class: "diff", tabindex: 0, "aria-label": "Changed lines" }, lines) : null,
    hasHidden ? h("p", { class: "bad" }, "It cannot be applied as long as secrets stand there as ***.") : null,
  ].filter(Boolean);
}
