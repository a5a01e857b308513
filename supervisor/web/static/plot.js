// A plot of the last ten minutes, in SVG: lines, or stacked areas.

import { el, say } from "./dom.js";
import { clock } from "./format.js";

const WIDTH = 600, HEIGHT = 120, SECONDS = 600;
const GAP_SECONDS = 20; // a longer gap between points breaks the line
const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

// Returns the next of 1, 2, 5, 10, 20, ...
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}

export class Plot {
  constructor(figure, series, { stacked = false, unit = "", show }) {
    this.series = series; // names of fields
    this.stacked = stacked;
    this.unit = unit;
    this.show = show;
    this.values = new Map();
    const legend = el("div", { class: "legend" });
    for (const name of series) {
      const value = el("b", {}, "–");
      this.values.set(name, value);
      legend.append(el("span", { title: name }, el("i", { class: `k-${name}` }), el("span", { class: "word dim" }, `${name} `), value));
    }
    figure.querySelector("figcaption").append(legend);
    this.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    for (const at of [0.5, HEIGHT / 2, HEIGHT - 0.5]) this.svg.append(svg("line", { x1: 0, x2: WIDTH, y1: at, y2: at, class: "grid-line" }));
    this.paths = series.map((name) => {
      const path = svg("path", { class: stacked ? `fill k-${name}` : `line k-${name}` });
      this.svg.append(path);
      return path;
    });
    this.cross = svg("line", { y1: 0, y2: HEIGHT, class: "cross", visibility: "hidden" });
    this.svg.append(this.cross);
    this.top = el("span", { class: "top" });
    this.none = el("span", { class: "none" }, "No data yet");
    this.area = el("div", { class: "area" }, this.svg, this.top, this.none);
    this.left = el("span", {}, "10 min ago");
    figure.append(this.area, el("div", { class: "axis" }, this.left, el("span", {}, "now")));
    this.area.addEventListener("pointermove", (event) => this.#point(event));
    this.area.addEventListener("pointerleave", () => { this.hover = null; this.draw(this.points, this.fields, this.now); });
  }

  draw(points, fields, now) {
    if (!points) return;
    Object.assign(this, { points, fields, now });
    const columns = this.series.map((name) => fields.indexOf(name));
    const from = now - SECONDS;
    let most = 0;
    for (const point of points) {
      const sum = this.stacked ? columns.reduce((total, column) => total + point[column], 0) : Math.max(...columns.map((column) => point[column]));
      if (sum > most) most = sum;
    }
    const height = ceiling(most);
    const x = (at) => ((at - from) / SECONDS * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - value / height * (HEIGHT - 4)).toFixed(1);
    if (this.stacked) this.#areas(points, columns, x, y);
    else this.#lines(points, columns, x, y);
    this.none.hidden = points.length > 1;
    say(this.top, most ? `${this.show(height)}${this.unit}` : "");
    const shown = this.#at() ?? points.at(-1);
    this.series.forEach((name, index) => say(this.values.get(name), shown ? this.show(shown[columns[index]]) : "–"));
    this.cross.setAttribute("visibility", this.#at() ? "visible" : "hidden");
    if (this.#at()) { this.cross.setAttribute("x1", x(shown[0])); this.cross.setAttribute("x2", x(shown[0])); }
    say(this.left, this.#at() ? clock(shown[0]) : "10 min ago");
    const last = points.at(-1);
    if (last) this.svg.setAttribute("aria-label", this.series.map((name, index) => `${name} ${this.show(last[columns[index]])}${this.unit}`).join(", "));
  }

  #at() { return this.hover == null ? null : this.points.find((point) => point[0] === this.hover); }

  #lines(points, columns, x, y) {
    columns.forEach((column, index) => {
      let path = "", before = -Infinity;
      for (const point of points) {
        path += `${point[0] - before > GAP_SECONDS ? "M" : "L"}${x(point[0])} ${y(point[column])}`;
        before = point[0];
      }
      this.paths[index].setAttribute("d", path);
    });
  }

  #areas(points, columns, x, y) {
    let floor = points.map(() => 0);
    columns.forEach((column, index) => {
      const top = points.map((point, at) => floor[at] + point[column]);
      let path = "", begin = 0;
      for (let end = 1; end <= points.length; end += 1) {
        if (end < points.length && points[end][0] - points[end - 1][0] <= GAP_SECONDS) continue;
        for (let at = begin; at < end; at += 1) path += `${at === begin ? "M" : "L"}${x(points[at][0])} ${y(top[at])}`;
        for (let at = end - 1; at >= begin; at -= 1) path += `L${x(points[at][0])} ${y(floor[at])}`;
        path += "Z";
        begin = end;
      }
      this.paths[index].setAttribute("d", points.length > 1 ? path : "");
      floor = top;
    });
  }

  #point(event) {
    if (!this.points?.length) return;
    const box = this.area.getBoundingClientRect();
    const at = this.now - SECONDS * (1 - (event.clientX - box.left) / box.width);
    let best = 0;
    this.points.forEach((point, index) => { if (Math.abs(point[0] - at) < Math.abs(this.points[best][0] - at)) best = index; });
    this.hover = this.points[best][0];
    this.draw(this.points, this.fields, this.now);
  }
}
