// A line chart of the last quarter of an hour, or of what there is of it: lines are told apart by dashes and labels too, not by colour alone.

import { h, s } from "./dom.js";
import { clock } from "./format.js";

const LONGEST = 900; // seconds
const SHORTEST = 120;
const HEIGHT = 130;
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 20;
const GAP = 12; // seconds without a point after which a line breaks off

/** `lines` are {label, value(point)}, the first one drawn on top; `write` makes words of a value. */
export class Chart {
  constructor({ title, lines, write, most = null }) {
    Object.assign(this, { lines, write, most, points: [], at: 0, title });
    this.drawing = s("svg", { role: "img", "aria-label": title, height: HEIGHT, width: "100%" });
    this.readings = lines.map(() => h("span", { class: "reading" }));
    this.when = h("span", { class: "muted" });
    const legend = lines.map((line, index) =>
      h("span", { class: `line-${index}` }, key(index), `${line.label} `, this.readings[index]),
    );
    this.element = h("figure", { class: "panel chart" }, h("figcaption", {}, h("h3", {}, title), h("p", { class: "legend" }, legend, this.when)), this.drawing);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => this.read(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  show(points, at) {
    Object.assign(this, { points, at });
    this.draw();
  }

  draw() {
    const width = this.drawing.clientWidth;
    if (!width) return;
    const values = this.points.flatMap((point) => this.lines.map((line) => line.value(point)));
    this.span = Math.min(LONGEST, Math.max(SHORTEST, this.at - (this.points[0]?.t ?? this.at)));
    this.top = this.most ?? nice(Math.max(0, ...values.filter(known)));
    this.x = (t) => LEFT + ((t - this.at + this.span) / this.span) * (width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - (Math.min(value, this.top) / this.top) * (HEIGHT - TOP - BOTTOM);
    this.cursor = s("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
    const lines = this.lines.map((line, index) => s("path", { class: `path line-${index}`, d: this.path(line) })).reverse();
    this.drawing.replaceChildren(...this.axes(width), ...lines, this.cursor);
    this.read(null);
  }

  axes(width) {
    const levels = [0, this.top / 2, this.top];
    const rules = levels.flatMap((value) => [
      s("line", { class: "rule", x1: LEFT, x2: width - RIGHT, y1: this.y(value), y2: this.y(value) }),
      s("text", { x: LEFT - 6, y: this.y(value) + 4, "text-anchor": "end" }, this.write(value)),
    ]);
    const ago = (t) => (t < 120 ? `${Math.round(t)} s ago` : `${Math.round(t / 6) / 10} min ago`);
    const times = [[-this.span, ago(this.span), "start"], [-this.span / 2, ago(this.span / 2), "middle"], [0, "now", "end"]];
    return [...rules, ...times.map(([t, label, anchor]) => s("text", { x: this.x(this.at + t), y: HEIGHT - 4, "text-anchor": anchor }, label))];
  }

  path(line) {
    let drawn = "", last = -Infinity;
    for (const point of this.points) {
      const value = line.value(point);
      if (!known(value) || point.t < this.at - this.span - GAP) continue;
      drawn += `${point.t - last > GAP ? "M" : "L"}${this.x(point.t).toFixed(1)} ${this.y(value).toFixed(1)}`;
      if (point.t - last > GAP) drawn += "h0.01";
      last = point.t;
    }
    return drawn;
  }

  point(event) {
    const x = event.clientX - this.drawing.getBoundingClientRect().left;
    const distance = (point) => Math.abs(this.x(point.t) - x);
    this.read(this.points.length ? this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best)) : null);
  }

  /** What stands in the legend: a point, or else the latest one. */
  read(chosen) {
    const point = chosen ?? this.points.at(-1) ?? null;
    const words = this.lines.map((line) => (point ? this.write(line.value(point)) : "–"));
    words.forEach((word, index) => (this.readings[index].textContent = word));
    this.when.textContent = chosen ? clock(chosen.t) : "";
    this.cursor?.setAttribute("x1", chosen ? this.x(chosen.t) : -9);
    this.cursor?.setAttribute("x2", chosen ? this.x(chosen.t) : -9);
    if (!chosen) this.drawing.setAttribute("aria-label", `${this.title}: ${this.lines.map((line, index) => `${line.label} ${words[index]}`).join(", ")}; ${this.range()}`);
  }

  range() {
    const values = this.points.map(this.lines[0].value).filter(known);
    return values.length ? `${this.lines[0].label} from ${this.write(Math.min(...values))} to ${this.write(Math.max(...values))} in 15 minutes` : "nothing yet";
  }
}

const key = (index) => s("svg", { class: "key", width: 22, height: 8, "aria-hidden": "true" }, s("path", { class: `path line-${index}`, d: "M1 4H21" }));

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** A round number at or above. */
function nice(value) {
  if (!value) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((step) => step * power).find((step) => step >= value);
}
