// SPDX-License-Identifier: Apache-2.0
// A bar for each host: what its memory is used for.

import { keep, make, say, tell } from "./dom.js";
import { colour, letter } from "./palette.js";
import { number, size } from "./units.js";

const PARTS = [
  ["own", "used by its own programs"],
  ["cache", "page cache in use"],
  ["lent", "lent, coloured by consumer"],
  ["pool", "pool, ready to lend"],
  ["free", "free"],
  ["headroom", "headroom, never lent"],
];

/** What the parts of a bar are. */
export function drawLegend(list) {
  for (const [name, words] of PARTS) {
    const item = make("li");
    item.append(make("span", `swatch part-${name}`), make("span", "", words));
    list.append(item);
  }
}

/** All hosts. */
export function drawHosts(list, look) {
  keep(list, look.donors, (row) => row.address, build, update);
}

function build() {
  const item = make("li", "host");
  const head = make("div", "host-head");
  head.append(make("span", "chip"), make("h3"), make("span", "state"), make("span", "address"));
  const bar = make("div", "bar");
  bar.setAttribute("role", "img");
  const notes = make("ul", "notes");
  item.append(head, bar, make("p", "figures"), notes);
  return item;
}

function update(item, row) {
  const [head, bar, figures, notes] = item.children;
  const [chip, name, state, address] = head.children;
  chip.className = `chip ${colour(row.name)}`;
  say(chip, letter(row.name));
  say(name, row.name);
  say(state, stateOf(row));
  say(address, row.address === row.name ? "" : row.address);
  item.classList.toggle("silent", !row.answers);
  item.classList.toggle("attention", row.answers && row.state !== "serving");
  bar.hidden = !row.segments;
  if (row.segments) drawBar(bar, row);
  say(figures, row.segments ? wordsOf(row) : "");
  const said = row.answers ? row.notes : [row.error];
  keep(notes, said.filter(Boolean), (text) => text, () => make("li"), say);
}

function stateOf(row) {
  if (row.answers) return row.state;
  if (row.age_s === null) return row.state;
  return `${row.state}: figures are ${row.age_s.toFixed(0)} s old`;
}

function partsOf(row) {
  return PARTS.flatMap(([name, words]) => {
    if (name !== "lent") return [{ key: name, css: `part-${name}`, words, bytes: row.segments[name] }];
    const lent = Object.entries(row.lent_to).filter(([, bytes]) => bytes > 0);
    return lent.map(([host, bytes]) => ({
      key: `lent ${host}`, css: `part-lent ${colour(host)}`, words: `lent to ${host}`, bytes,
      mark: letter(host),
    }));
  }).filter((part) => part.bytes > 0);
}

function drawBar(bar, row) {
  const parts = partsOf(row);
  tell(bar, "aria-label", `Memory of ${row.name}: ${sentence(parts)}`);
  keep(bar, parts, (part) => part.key, () => make("span"), (span, part) => {
    span.className = part.css;
    span.style.flexGrow = String(part.bytes / row.total_bytes);
    say(span, part.bytes / row.total_bytes > 0.02 && part.mark ? part.mark : "");
    tell(span, "title", `${part.words}: ${size(part.bytes)}`);
  });
}

function sentence(parts) {
  return parts.map((part) => `${part.words} ${size(part.bytes)}`).join(", ");
}

function wordsOf(row) {
  const lent = Object.entries(row.lent_to).filter(([, bytes]) => bytes > 0);
  const to = lent.map(([host, bytes]) => `${host} ${size(bytes)}`).join(", ");
  return [
    `${size(row.total_bytes)} in all`,
    `own use ${size(row.segments.own)}`,
    ...(row.segments.cache ? [`page cache in use ${size(row.segments.cache)}`] : []),
    `lent ${size(row.segments.lent)}${to ? ` (${to})` : ""}`,
    `can lend ${size(row.can_lend_bytes)} more`,
    `headroom ${size(row.headroom_bytes)}`,
    `${number(row.pages_per_s)} pages/s`,
    `${row.evictions} taken back`,
  ].join(" · ");
}
