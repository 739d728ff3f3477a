// Elements without a framework: made once, changed only where they differ.

/** h("button", {class: "x", onclick: f, "aria-label": "…"}, "text", node, [nodes]) */
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

const SVG = "http://www.w3.org/2000/svg";

export function s(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const $ = (id) => document.getElementById(id);

/** Texts and attributes that are as they should be are left alone: screen readers and style would start anew. */
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function attribute(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** A table with headers that are headers; `numbers` are the columns to be aligned to the right. */
export function table({ caption, columns, rows, numbers = [], className = "" }) {
  const align = (index) => (numbers.includes(index) ? "number" : null);
  const head = columns.map((column, index) => h("th", { scope: "col", class: align(index) }, column));
  const body = rows.map((row) => {
    const cells = row.cells.map((cell, index) =>
      index === 0 ? h("th", { scope: "row" }, cell) : h("td", { class: align(index) }, cell),
    );
    return h("tr", row.properties ?? {}, cells);
  });
  return h(
    "table",
    { class: className || null },
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, head)),
    h("tbody", {}, body),
  );
}

export const hint = (...words) => h("p", { class: "hint" }, ...words);

/** The page moves a focus that was inside of what is rendered anew to its successor. */
export function replace(parent, ...children) {
  const key = parent.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const { scrollLeft, scrollTop } = parent;
  parent.replaceChildren(...children);
  parent.scrollLeft = scrollLeft;
  parent.scrollTop = scrollTop;
  if (key) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}
