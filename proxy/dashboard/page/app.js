// The page: what comes from the port goes to the panels that it concerns, at most once per frame.

import { attention } from "./attention.js";
import { configuration } from "./configuration.js";
import * as decisions from "./decisions.js";
import * as dialog from "./dialog.js";
import { $, attribute, text } from "./dom.js";
import { figures } from "./figures.js";
import * as fleet from "./fleet.js";
import { assess } from "./health.js";
import { heat } from "./heat.js";
import { queues } from "./queues.js";
import { scaling } from "./scaling.js";
import { shadows } from "./shadows.js";
import { state, take } from "./state.js";
import { follow } from "./stream.js";
import * as theme from "./theme.js";
import { trends } from "./trends.js";

const PANELS = { points: trends, heat, queues, scaling, shadows, about: configuration };

let paused = false;
let changed = new Set();
let due = false;

theme.listen();
fleet.listen();
dialog.listen();
decisions.listen(() => paused);
$("pause").addEventListener("click", () => {
  paused = !paused;
  attribute($("pause"), "aria-pressed", paused);
  text($("pause"), paused ? "Resume" : "Pause");
  if (!paused) schedule();
});
follow("/dashboard/events", told, connection);

function told(name, data) {
  for (const part of take(name, data)) changed.add(part);
  schedule();
}

function schedule() {
  if (due || paused) return;
  due = true;
  requestAnimationFrame(render);
}

function render() {
  due = false;
  const parts = changed;
  changed = new Set();
  const assessed = assess();
  attention(assessed, fleet.show);
  figures();
  if (parts.has("pods")) fleet.fleet(assessed);
  for (const [part, show] of Object.entries(PANELS)) if (parts.has(part)) show();
  if (parts.has("pods")) dialog.redraw();
  const { version, workers, pools } = state.about ?? {};
  const words = [version, workers > 1 && `${workers} workers`, pools?.length > 1 && `${pools.length} pools`].filter(Boolean);
  text($("about"), words.join(" · "));
  document.title = `kvlane: ${$("attention-title").textContent}`;
}

const STATES = { live: ["live", "ok"], lost: ["connection lost", "bad"], full: ["too many viewers", "warn"] };

function connection(now) {
  const [words, tone] = STATES[now];
  text($("connection"), words);
  attribute($("connection"), "data-tone", tone);
  document.body.dataset.connection = now;
}
