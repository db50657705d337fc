// SPDX-License-Identifier: Apache-2.0
// Figures as text.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes in the largest unit that leaves a whole part: "3.5 GiB". */
export function size(bytes) {
  let unit = 0;
  let value = bytes;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit > 0 && value < 10 && !Number.isInteger(value) ? 1 : 0;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** A rate or a latency; unknown: a dash. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(0)} k`;
  return value < 10 && value > 0 ? value.toFixed(1) : value.toFixed(0);
}

/** Microseconds; long ones in milliseconds. */
export function latency(us) {
  if (us === null || us === undefined) return "–";
  return us < 10000 ? `${number(us)} µs` : `${number(us / 1000)} ms`;
}

/** Time of day. */
export function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString([], { hour12: false });
}

/** "1 slab", "2 slabs". */
export function count(howMany, what) {
  return `${howMany} ${what}${howMany === 1 ? "" : "s"}`;
}
