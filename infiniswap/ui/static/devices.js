// SPDX-License-Identifier: Apache-2.0
// A map for each device: one cell for each slab, with the donor that holds it and how hot it is.

import { keep, make, say, tell } from "./dom.js";
import { colour, letter } from "./palette.js";
import { count, latency, number, size } from "./units.js";

const CELLS_MAX = 8192; // of all devices: beyond it a browser gets slow
const HOT_PAGES_PER_S = 10000;

/** All devices. */
export function drawDevices(parent, look) {
  let left = CELLS_MAX;
  keep(parent, look.devices, (row) => row.id, build, (item, row) => {
    left -= update(item, row, look, left);
  });
}

function build(row) {
  const item = make("article", "device");
  const cells = make("div", "cells");
  cells.id = `cells-${row.id}`;
  cells.setAttribute("role", "listbox");
  cells.tabIndex = 0;
  const readout = make("p", "readout");
  readout.setAttribute("aria-hidden", "true"); // a screen reader reads the cell itself
  item.append(make("h3"), make("p", "figures"), cells, readout);
  cells.addEventListener("keydown", (event) => move(cells, event));
  cells.addEventListener("focus", () => select(cells, cells.current ?? 0));
  cells.addEventListener("click", (event) => {
    const cell = event.target.closest("[role=option]");
    if (cell) select(cells, [...cells.children].indexOf(cell));
  });
  return item;
}

/** Returns how many cells it has drawn. */
function update(item, row, look, left) {
  const [title, figures, cells] = item.children;
  say(title, titleOf(row));
  say(figures, wordsOf(row));
  item.classList.toggle("silent", !row.fresh);
  item.classList.toggle("alarm", row.alarms > 0);
  const shown = cellsOf(row, left);
  cells.hidden = !shown.length;
  tell(cells, "aria-label", `Slabs of ${row.name} of ${row.host}: ${summary(shown, row, look)}`);
  keep(cells, shown, ([slab]) => slab, ([slab]) => buildCell(row.id, slab), (cell, one) => {
    updateCell(cell, one, look);
  });
  select(cells, Math.min(cells.current ?? 0, shown.length - 1), false);
  return shown.length;
}

function titleOf(row) {
  const who = [row.job, row.user && `by ${row.user}`].filter(Boolean).join(" ");
  const host = row.certified ? row.host : `${row.host}*`;
  return `${row.name} of ${host}${who ? `: ${who}` : ""}`;
}

function wordsOf(row) {
  const parts = [];
  if (!row.fresh) parts.push("no donor that answers tells of it");
  if (row.size_bytes !== null) parts.push(size(row.size_bytes));
  parts.push(`${count(row.cells.length + row.cells_left_out, "slab")} on donors`);
  if (row.far_bytes) parts.push(`far memory ${size(row.far_bytes)}`);
  if (row.suspended) parts.push(`${row.suspended} cannot be reached`);
  if (row.alarms) parts.push(count(row.alarms, "alarm"));
  if (row.in_donors_per_s !== null) {
    parts.push(`in ${number(row.in_donors_per_s)}/s from donors, ${number(row.in_disk_per_s)}/s from disk`);
    parts.push(`out ${number(row.out_per_s)}/s`);
  }
  if (row.page_in_us_p50 !== null) {
    parts.push(`page-in ${latency(row.page_in_us_p50)}, 99 of 100 below ${latency(row.page_in_us_p99)}`);
  }
  return parts.join(" · ");
}

/** Every slab of the device where there is room for that, else those that have a donor. */
function cellsOf(row, left) {
  if (row.slabs === null || row.slabs > left) return row.cells.slice(0, left);
  const placed = new Map(row.cells.map((cell) => [cell[0], cell]));
  return Array.from({ length: row.slabs }, (_, slab) => placed.get(slab) ?? [slab, [], null]);
}

function summary(shown, row, look) {
  const held = new Map();
  let none = 0;
  for (const [, places] of shown) {
    if (!places.length) none += 1;
    for (const place of places) held.set(place, (held.get(place) ?? 0) + 1);
  }
  const words = [...held].map(([place, many]) => `${many} on ${look.donors[place].name}`);
  if (none) words.push(`${none} without a donor`);
  if (row.slabs > shown.length) words.push(`${row.slabs - shown.length} more are not drawn`);
  return words.join(", ") || "none";
}

function buildCell(device, slab) {
  const cell = make("div", "cell");
  cell.id = `cell-${device}-${slab}`;
  cell.setAttribute("role", "option");
  cell.setAttribute("aria-selected", "false");
  cell.append(make("span", "mark"), make("span", "heat"));
  return cell;
}

function updateCell(cell, [slab, places, heat], look) {
  const donors = places.map((place) => look.donors[place]);
  const silent = donors.length > 0 && donors.every((donor) => !donor.answers);
  const [mark, bar] = cell.children;
  const main = donors.at(-1);
  cell.className = ["cell", main ? colour(main.name) : "unmapped", silent && "silent",
    donors.length > 1 && "moving"].filter(Boolean).join(" ");
  let sign = main ? letter(main.name) : "";
  if (silent) sign = "!";
  else if (donors.length > 1) sign = "»";
  say(mark, sign);
  bar.style.width = `${share(heat) * 100}%`;
  const words = describe(slab, donors, heat, silent);
  tell(cell, "aria-label", words);
  tell(cell, "title", words);
}

/** 0 to 1, as a logarithm: slabs differ by orders of magnitude. */
function share(heat) {
  if (!heat || heat < 1) return 0;
  return Math.min(1, Math.log10(heat) / Math.log10(HOT_PAGES_PER_S));
}

function describe(slab, donors, heat, silent) {
  const names = donors.map((donor) => donor.name);
  let where = "has no donor; its pages are on the local disk";
  if (silent) where = `is on ${names.join(" and ")}, which cannot be reached`;
  else if (names.length > 1) where = `is being moved from ${names[0]} to ${names.slice(1).join(" and ")}`;
  else if (names.length) where = `is on ${names[0]}`;
  const busy = donors.length && heat !== null ? `, ${number(heat)} pages/s` : "";
  return `slab ${slab} ${where}${busy}`;
}

// -------------------------------------------------------------------------- keyboard

function columnsOf(cells) {
  const first = cells.firstElementChild;
  if (!first) return 1;
  let columns = 1;
  while (cells.children[columns] && cells.children[columns].offsetTop === first.offsetTop) columns += 1;
  return columns;
}

function move(cells, event) {
  const last = cells.children.length - 1;
  const at = cells.current ?? 0;
  const steps = {
    ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last,
    ArrowUp: at - columnsOf(cells), ArrowDown: at + columnsOf(cells),
  };
  if (!(event.key in steps)) return;
  event.preventDefault();
  select(cells, Math.max(0, Math.min(last, steps[event.key])));
}

/** Makes a cell the current one, and shows its words below. */
function select(cells, index, scrolls = true) {
  const cell = cells.children[index];
  const readout = cells.nextElementSibling;
  const before = cells.children[cells.current ?? -1];
  if (before && before !== cell) tell(before, "aria-selected", "false");
  if (!cell) {
    cells.current = undefined;
    tell(cells, "aria-activedescendant", null);
    say(readout, "");
    return;
  }
  cells.current = index;
  const focused = document.activeElement === cells;
  tell(cell, "aria-selected", focused ? "true" : "false");
  tell(cells, "aria-activedescendant", focused ? cell.id : null);
  say(readout, focused ? cell.getAttribute("aria-label") : "");
  if (focused && scrolls) cell.scrollIntoView({ block: "nearest" });
}
