// SPDX-License-Identifier: Apache-2.0
// Puts the page together: what a look says goes to the parts, and old figures look old.

import { buildCharts, drawCharts } from "./charts.js";
import { drawDevices } from "./devices.js";
import { keep, make, say } from "./dom.js";
import { addEvents } from "./events.js";
import { drawHosts, drawLegend } from "./hosts.js";
import { connect } from "./live.js";
import { clock, count, size } from "./units.js";

const SAMPLES_MAX = 150;
const LATE_LOOKS = 3;

const at = (id) => document.getElementById(id);

const state = {
  look: null,
  samples: [],
  lookS: 2,
  heardMs: 0,
  isPaused: false,
  toldS: 0,
  isLost: false,
};

function take(message) {
  show("in");
  state.isLost = false;
  if (message.kind === "past") {
    state.samples = message.samples;
    state.lookS = message.look_s;
    tellEvents(message.events.filter((event) => event.at_s > state.toldS)); // the others are there
    return;
  }
  state.look = message;
  state.heardMs = performance.now();
  if (state.samples.at(-1)?.at_s !== message.at_s) state.samples.push(message.sample);
  state.samples = state.samples.slice(-SAMPLES_MAX);
  tellEvents(message.events);
  if (!state.isPaused) redraw();
  tick();
}

function tellEvents(events) {
  addEvents(at("events"), events);
  state.toldS = events.at(-1)?.at_s ?? state.toldS;
  at("events-none").hidden = at("events").children.length > 0;
}

function redraw() {
  const look = state.look;
  const answer = look.donors.filter((donor) => donor.answers);
  const lent = answer.reduce((sum, donor) => sum + donor.segments.lent, 0);
  say(at("summary"), `${answer.length} of ${count(look.donors.length + look.donors_left_out, "host")} answer · `
    + `${size(lent)} lent · ${count(look.devices.length + look.devices_left_out, "device")} · ${clock(look.at_s)}`);
  keep(at("problems"), look.problems, (text) => text, () => make("li"), say);
  drawHosts(at("hosts"), look);
  drawDevices(at("devices"), look);
  drawCharts(at("charts"), state.samples, look.at_s);
  none(at("hosts-none"), look.donors_left_out ? `and ${count(look.donors_left_out, "more host")}` : "");
  let devices = "";
  if (!look.devices.length) devices = "No device has a lease on these hosts. `infiniswap run` starts one for a job.";
  else if (look.devices_left_out) devices = `and ${count(look.devices_left_out, "more device")}`;
  none(at("devices-none"), devices);
  const claimed = look.devices.some((device) => !device.certified);
  say(at("foot"), `Seen by the daemon of ${look.by}. ${claimed ? "* as the device says: no certificate proves the host's name. " : ""}`
    + "Figures are those of `infiniswap status --json`. The longer past is in Prometheus.");
}

function none(element, text) {
  element.hidden = !text;
  say(element, text);
}

/** Says how old the figures are, once they are older than they should be. */
function tick() {
  const ageS = (performance.now() - state.heardMs) / 1000;
  const isLate = state.look !== null && ageS > LATE_LOOKS * state.lookS;
  const isStale = state.isLost || isLate;
  document.body.classList.toggle("stale", isStale);
  let words = "";
  if (isStale && state.look) {
    words = `The daemon of ${state.look.by} does not answer: these figures are of ${clock(state.look.at_s)}. `
      + "The page keeps trying; see whether the daemon runs.";
  } else if (isStale) {
    words = "The daemon does not answer. The page keeps trying.";
  } else if (state.isPaused) {
    words = `Paused: these figures are of ${clock(state.pausedAtS)}.`;
  }
  at("notice").hidden = !words;
  say(at("notice"), words);
}

function show(id) {
  at("in").hidden = id !== "in";
  at("out").hidden = id !== "out";
}

function pause() {
  state.isPaused = !state.isPaused && state.look !== null;
  state.pausedAtS = state.look?.at_s;
  at("pause").setAttribute("aria-pressed", String(state.isPaused));
  document.body.classList.toggle("paused", state.isPaused);
  if (!state.isPaused && state.look) redraw();
  tick();
}

function out(why) {
  show("out");
  say(at("why"), why);
  say(at("summary"), "not signed in");
  at("notice").hidden = true;
}

function lost() {
  state.isLost = true;
  tick();
}

drawLegend(at("legend"));
buildCharts(at("charts"));
at("pause").addEventListener("click", pause);
if ("WebSocket" in globalThis) {
  connect({ message: take, out, lost });
  setInterval(tick, 1000);
} else {
  out("This browser has no WebSocket, by which the page is kept up to date. Use another browser, or `infiniswap top` in a terminal.");
}
