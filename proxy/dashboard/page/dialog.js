// The dialog in which one thing is looked at closely.

import { $, h, replace } from "./dom.js";

let refresh = null;

/** `render()` gives {title, body}, and is called again whenever something has changed, until the dialog is closed. */
export function open(render) {
  refresh = render;
  draw();
  const dialog = $("dialog");
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

export function redraw() {
  if (refresh) draw();
}

export function listen() {
  const dialog = $("dialog");
  // The event comes later than the closing: by then it may be open again, with something else in it.
  dialog.addEventListener("close", () => dialog.open || (refresh = null));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}

function draw() {
  const { title, body } = refresh();
  const close = h("button", { type: "button", "data-key": "close", onclick: () => $("dialog").close() }, "Close");
  replace($("dialog"), h("div", { class: "head" }, h("h2", { id: "dialog-title" }, title), close), ...body);
}
