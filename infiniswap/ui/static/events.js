// SPDX-License-Identifier: Apache-2.0
// What has happened, the last event first.

import { make } from "./dom.js";
import { clock } from "./units.js";

const SHOWN_MAX = 200;

/** Adds events, the last one last. */
export function addEvents(list, events) {
  for (const event of events) {
    const item = make("li", event.tone);
    const mark = { bad: "! ", good: "✓ " }[event.tone] ?? "";
    const time = make("time", "", clock(event.at_s));
    time.dateTime = new Date(event.at_s * 1000).toISOString();
    item.append(time, make("span", "", mark + event.text));
    list.prepend(item);
  }
  while (list.children.length > SHOWN_MAX) list.lastChild.remove();
}
