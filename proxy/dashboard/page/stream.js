// Server-sent events by fetch: an EventSource cannot send a key.

import { request } from "./session.js";

const FIRST_WAIT = 500;
const LONGEST_WAIT = 10_000;
const SILENCE = 8_000; // milliseconds: the port sends something every second

/** Calls `told(name, data)` for each event and `state("live" | "lost" | "full")`, for ever. */
export async function follow(path, told, state) {
  let wait = FIRST_WAIT;
  for (;;) {
    const silence = new AbortController();
    try {
      const answer = await request(path, { signal: silence.signal });
      if (!answer.ok) throw new Error(String(answer.status));
      for await (const [name, data] of events(answer.body, () => silence.abort())) {
        wait = FIRST_WAIT;
        state("live");
        told(name, JSON.parse(data));
      }
    } catch (error) {
      state(error.message === "429" ? "full" : "lost");
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(2 * wait, LONGEST_WAIT);
    }
  }
}

async function* events(body, giveUp) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const timer = setTimeout(giveUp, SILENCE);
    const { done, value } = await reader.read();
    clearTimeout(timer);
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const [first, second] = part.split("\n");
      yield [first.slice("event: ".length), second.slice("data: ".length)];
    }
  }
}
