// SPDX-License-Identifier: Apache-2.0
// Elements without HTML: what donors and devices say is text, and enters the page as text alone.

const SVG = "http://www.w3.org/2000/svg";

/** An element with a class and, perhaps, a text. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

/** A part of a drawing, with its attributes. */
export function draw(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Changes a text only where it differs: screen readers speak of changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Changes an attribute only where it differs; null removes it. */
export function tell(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** One child of `parent` for each row, in their order. A child that is there already is kept with
 *  its focus: `build(row)` makes it, `update(child, row)` draws the row into it. */
export function keep(parent, rows, keyOf, build, update) {
  const old = parent.kept ?? new Map();
  const now = new Map();
  let place = parent.firstChild;
  for (const row of rows) {
    const key = String(keyOf(row));
    if (now.has(key)) continue; // the same text twice
    const child = old.get(key) ?? build(row);
    old.delete(key);
    now.set(key, child);
    if (child === place) place = place.nextSibling;
    else parent.insertBefore(child, place);
    update(child, row);
  }
  for (const gone of old.values()) gone.remove();
  parent.kept = now;
}
