// Requests to the admin port, with its key where it asks for one. The key is in this module's memory and nowhere else.

import { $, attribute, h, replace, text } from "./dom.js";

let key = null;
let asking = null;

/** The answer, whatever its status; only a 401 or 403 for a missing key is asked about and tried again. */
export async function request(path, options = {}) {
  for (;;) {
    const used = key;
    const answer = await fetch(path, { ...options, headers: { ...options.headers, ...authorization(used) }, cache: "no-store" });
    if (answer.status !== 401) return answer;
    if (used === key) {
      await ask(used === null ? null : "This key was not accepted. Try another one.");
    }
  }
}

/** Its JSON. Throws an Error with what the port says is wrong, in `problems` too where it is a configuration. */
export async function call(path, options) {
  const answer = await request(path, options);
  const body = await answer.json().catch(() => ({}));
  if (answer.ok) return body;
  const error = new Error(body.error?.message ?? `${answer.status} ${answer.statusText}`);
  error.status = answer.status;
  error.problems = body.error?.problems ?? [];
  throw error;
}

const authorization = (used) => (used === null ? {} : { authorization: `Bearer ${used}` });

/** One dialog, however many wait for it. */
function ask(why) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    if (why) text($("key-why"), why);
    $("key").value = "";
    dialog.onclose = () => asking && missing(dialog);
    $("key-form").addEventListener(
      "submit",
      () => {
        key = $("key").value;
        $("key").value = "";
        asking = null;
        resolve();
      },
      { once: true },
    );
    if (!dialog.open) dialog.showModal();
  });
  return asking;
}

/** The dialog was closed, and what waits for the key waits on. */
function missing(dialog) {
  text($("connection"), "no key");
  attribute($("connection"), "data-tone", "warn");
  text($("attention-title"), "Nothing can be shown without the admin key");
  delete $("findings").dataset.shown;
  const enter = h("button", { type: "button", id: "enter-key", onclick: () => dialog.showModal() }, "Enter the key");
  replace($("findings"), h("li", {}, enter));
}
