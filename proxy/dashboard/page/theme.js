// Light, dark, or as the system has it. The choice is remembered by the browser; nothing else is.

import { $, text } from "./dom.js";

const CHOICES = { auto: "light dark", light: "light", dark: "dark" };
const NAME = "kvlane-theme";

export function listen() {
  let chosen = localStorage.getItem(NAME) ?? "auto";
  const set = (choice) => {
    chosen = choice in CHOICES ? choice : "auto";
    document.documentElement.style.colorScheme = CHOICES[chosen];
    text($("theme"), `Theme: ${chosen}`);
    localStorage.setItem(NAME, chosen);
  };
  set(chosen);
  const names = Object.keys(CHOICES);
  $("theme").addEventListener("click", () => set(names[(names.indexOf(chosen) + 1) % names.length]));
}
