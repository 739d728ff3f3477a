// Profiles that run beside the one that decides: how often they agree, and what they would have cost or saved.

import { $, h, hint, replace, table } from "./dom.js";
import { count, percent, seconds } from "./format.js";
import { state } from "./state.js";

export function shadows() {
  const found = state.shadows ?? [];
  if (!found.length) return replace($("shadow-list"), hint("No shadow profile has run. A scheduling profile with ", h("code", {}, "shadow: true"), " is tried on live traffic, and never acted upon."));
  const rows = found.map(({ profile, agreed, differed, sooner, later }) => ({
    cells: [profile, verdict(sooner, later), percent(agreed / Math.max(1, agreed + differed)), wait(sooner), wait(later)],
  }));
  return replace($("shadow-list"), table({ caption: "Shadow profiles since the start", columns: ["Profile", "In all", "Same pod", "Sooner", "Later"], rows, numbers: [1, 2, 3, 4] }));
}

const wait = ([number, total]) => (number ? `${count(number)} × ${seconds(total / number)}` : "–");

/** Predicted seconds to the first token, of all decisions together. */
function verdict([, saved], [, lost]) {
  if (!saved && !lost) return "unknown";
  return saved >= lost ? `saves ${seconds(saved - lost)}` : `costs ${seconds(lost - saved)}`;
}
