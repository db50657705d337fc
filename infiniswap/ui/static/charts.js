// SPDX-License-Identifier: Apache-2.0
// Lines over the last minutes. The longer past is Prometheus' business.

import { draw, make, say, tell } from "./dom.js";
import { latency, number } from "./units.js";

const WIDTH = 300;
const HEIGHT = 80;
const SPAN_S = 300;

const CHARTS = [
  {
    title: "Pages per second",
    text: (value) => `${number(value)}/s`,
    lines: [
      ["in_donors_per_s", "in from donors", "line-1"],
      ["in_disk_per_s", "in from disk", "line-2"],
      ["out_per_s", "out", "line-3"],
    ],
  },
  {
    title: "Latency of page-ins, the slowest device",
    text: latency,
    lines: [
      ["page_in_us_p50", "half below", "line-1"],
      ["page_in_us_p99", "99 of 100 below", "line-2"],
    ],
  },
];

/** Makes them, empty. */
export function buildCharts(parent) {
  for (const chart of CHARTS) {
    const figure = make("figure", "chart");
    const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    svg.append(draw("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5, class: "axis" }));
    const legend = make("ul", "legend");
    for (const [, , css] of chart.lines) {
      svg.append(draw("path", { class: css }));
      const item = make("li");
      const swatch = draw("svg", { viewBox: "0 0 24 8", class: "swatch-line", "aria-hidden": "true" });
      swatch.append(draw("path", { class: css, d: "M0 4H24" }));
      item.append(swatch, make("span"));
      legend.append(item);
    }
    const caption = make("figcaption");
    caption.append(make("h3", "", chart.title), make("p", "scale"));
    figure.append(caption, svg, legend, make("p", "times", "five minutes ago … now"));
    parent.append(figure);
  }
}

/** Draws the samples of the last minutes. */
export function drawCharts(parent, samples, nowS) {
  CHARTS.forEach((chart, index) => {
    const [caption, svg, legend] = parent.children[index].children;
    const top = Math.max(1, ...chart.lines.flatMap(([key]) => samples.map((one) => one[key] ?? 0)));
    say(caption.children[1], `the height is ${chart.text(top)}`);
    const words = chart.lines.map(([key, name], line) => {
      svg.children[line + 1].setAttribute("d", path(samples, key, top, nowS));
      const text = `${name} ${chart.text(samples.at(-1)?.[key])}`;
      say(legend.children[line].children[1], text);
      return text;
    });
    tell(svg, "aria-label", `${chart.title}: now ${words.join(", ")}`);
  });
}

function path(samples, key, top, nowS) {
  let drawn = "";
  let beforeS = -Infinity;
  for (const sample of samples) {
    const value = sample[key];
    const x = WIDTH * (1 - (nowS - sample.at_s) / SPAN_S);
    if (value === null || value === undefined || x < 0) {
      beforeS = -Infinity;
      continue;
    }
    const y = (HEIGHT - 2) * (1 - value / top) + 1;
    // What nobody has watched is a gap, not a line.
    drawn += `${sample.at_s - beforeS > 15 ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    beforeS = sample.at_s;
  }
  return drawn;
}
