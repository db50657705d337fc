// SPDX-License-Identifier: Apache-2.0
// A colour and a letter for each host, the same wherever it is shown: as donor and as consumer.
// Colours repeat after eight hosts, letters after 26; names are beside both.

const COLOURS = 8;
const known = new Map();

/** The number of a host, in the order of appearance. */
function numberOf(name) {
  if (!known.has(name)) known.set(name, known.size);
  return known.get(name);
}

/** The class that colours it. */
export function colour(name) {
  return `host-${numberOf(name) % COLOURS}`;
}

/** Its letter: A to Z, then A2 and so on. */
export function letter(name) {
  const number = numberOf(name);
  const round = Math.floor(number / 26);
  return String.fromCharCode(65 + (number % 26)) + (round ? String(round + 1) : "");
}
