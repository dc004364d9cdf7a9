// Charts drawn as SVG, without a library: lines and points over several axes, and confusion matrices.
//
// drawCharts(figures, view) draws every <div class="chart" data-figure="ID"> from figures[ID] and returns the charts.
// `view` is shared by all charts of a page: { axis, smoothing, hidden: Set of runs }; call draw() after changing it.
// Colors are CSS classes and variables, so the charts follow the color scheme of the reader and print in black on white.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const REACH = 14; // pixels between the cursor and a point that still counts as being there
const INTEGER_AXES = new Set(["step", "images", "trial", "block"]);

/** Create an SVG element, append it to `parent` and return it. */
function add(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== "") element.textContent = text;
  return parent.appendChild(element);
}

// ------------------------------------------------------------------------------------------------------------ numbers

/** Four significant digits: 0.9052, 1,357, 2.5e-4. */
function general(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e9) return exponential(value);
  return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(4, Math.floor(Math.log10(size)) + 1) });
}

function exponential(value) {
  return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
}

const FORMATS = {
  number: general,
  fixed: (value) => (Math.abs(value) >= 1e6 ? general(value) : value.toFixed(4)),
  percent: (value) => `${(100 * value).toFixed(2)}%`,
};

/** A function from ticks to their labels, with one unit and as many decimals as the distance between ticks needs. */
function tickLabels({ ticks, step }, format) {
  const size = Math.max(...ticks.map(Math.abs));
  const places = (factor) => ({ minimumFractionDigits: decimals(step / factor), maximumFractionDigits: decimals(step / factor) });
  if (format === "percent") return (value) => `${(100 * value).toLocaleString("en-US", places(0.01))}%`;
  if (step < 1e-3 || size >= 1e12) return (value) => (value === 0 ? "0" : exponential(value));
  const [unit, factor] = [["G", 1e9], ["M", 1e6], ["k", 1e3]].find(([, each]) => size >= 10 * each && step >= each / 10) ?? ["", 1];
  return (value) => (value === 0 ? "0" : `${(value / factor).toLocaleString("en-US", places(factor))}${unit}`);
}

function decimals(step) {
  return Math.min(20, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9)));
}

/** About `count` round numbers from `low` to `high`, and the distance between them. */
function niceTicks(low, high, count, integers = false) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = power * (rough < 1.5 * power ? 1 : rough < 3.5 * power ? 2 : rough < 7.5 * power ? 5 : 10);
  if (integers) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return { ticks, step };
}

/** Moving average without a bias towards zero at the start; gaps are preserved. */
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

const shorten = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// ------------------------------------------------------------------------------------------------------- common parts

/** What all charts have: a size that follows the page, a tooltip, and the keyboard. */
class Chart {
  constructor(element, figure, view) {
    Object.assign(this, { element, figure, view, cursor: null });
    this.svg = add(element, "svg", { "aria-hidden": "true" });
    this.tooltip = element.appendChild(document.createElement("div"));
    this.tooltip.className = "tooltip";
    this.tooltip.hidden = true;
    element.chart = this;
    element.tabIndex = 0;
    element.addEventListener("pointermove", (event) => this.point(event));
    element.addEventListener("pointerdown", (event) => this.point(event));
    element.addEventListener("pointerleave", () => this.leave());
    element.addEventListener("blur", () => this.leave());
    element.addEventListener("keydown", (event) => this.key(event));
    this.size = this.measure();
    new ResizeObserver(() => {
      const now = this.measure();
      if (now.width === this.size.width && now.height === this.size.height) return;
      this.size = now;
      this.draw();
    }).observe(element);
  }

  measure() {
    return { width: this.element.clientWidth, height: this.element.clientHeight };
  }

  /** Empty the drawing. The viewBox scales it where no script can redraw it: on paper. */
  clear() {
    this.leave();
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${Math.max(1, this.size.width)} ${Math.max(1, this.size.height)}`);
  }

  place(event) {
    const box = this.element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  /** Show lines of text next to a point; a line is { text, color, strong }. */
  tell(x, y, lines) {
    this.tooltip.replaceChildren(...lines.map(({ text, color, strong }) => {
      const line = document.createElement(strong ? "b" : "div");
      if (color) line.appendChild(Object.assign(document.createElement("span"), { className: "swatch" })).style.setProperty("--color", color);
      line.append(text);
      return line;
    }));
    this.tooltip.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.tooltip;
    const right = x + 14 + width <= this.size.width;
    const left = right ? x + 14 : Math.max(0, x - 14 - width);
    this.tooltip.style.transform = `translate(${left}px, ${Math.max(0, Math.min(y, this.size.height - height))}px)`;
  }

  leave() {
    this.tooltip.hidden = true;
    this.cursor = null;
    this.marks?.replaceChildren();
  }

  /** Arrow keys, Home and End move a cursor; Escape removes it. Screen readers hear the tooltip. */
  key(event) {
    this.tooltip.setAttribute("aria-live", "polite");
    const handled = event.key === "Escape" ? this.escape() : this.move(event.key);
    if (handled) event.preventDefault();
  }

  escape() {
    this.leave();
    return true;
  }
}

// -------------------------------------------------------------------------------------------------- lines and points

class Lines extends Chart {
  constructor(element, figure, view) {
    super(element, figure, view);
    this.zoom = null;
    element.addEventListener("pointerdown", (event) => this.startZoom(event));
    element.addEventListener("pointerup", (event) => this.endZoom(event));
    element.addEventListener("dblclick", () => this.zoomTo(null));
    this.draw();
  }

  get axis() {
    return this.view.axis in this.figure.axes ? this.view.axis : Object.keys(this.figure.axes)[0];
  }

  /** The curves as drawn: smoothed ones are drawn over their logged values, which are faint. */
  curves() {
    const { smoothing, hidden } = this.view;
    return this.figure.series.flatMap((series) => {
      const x = series.x[this.axis] ?? [];
      const curve = { ...series, x, y: x.length ? series.y : [], visible: !hidden.has(series.run), faint: false };
      if (!series.smooth || !smoothing || series.y.length < 3) return [curve];
      return [{ ...curve, faint: true }, { ...curve, y: smoothed(curve.y, smoothing), logged: curve.y }];
    });
  }

  draw() {
    if (this.zoomAxis !== this.axis) this.zoom = null;
    this.zoomAxis = this.axis;
    this.drawn = this.curves();
    this.clear();
    const shown = this.drawn.filter((curve) => curve.visible);
    this.points = shown.flatMap((curve) =>
      curve.x.flatMap((x, i) => (x === null || curve.y[i] === null ? [] : [{ curve, x, y: curve.y[i], i }])));
    if (!this.points.length) {
      const text = shown.length ? "no finite values" : "all runs are hidden";
      add(this.svg, "text", { x: this.size.width / 2, y: this.size.height / 2, "text-anchor": "middle" }, text);
      return;
    }
    this.scale();
    this.drawAxes();
    const clip = `clip-${clipped++}`;
    const { left, top, width, height } = this.frame;
    add(add(this.svg, "clipPath", { id: clip }), "rect", { x: left - 5, y: top - 5, width: width + 10, height: height + 10 });
    const group = add(this.svg, "g", { "clip-path": `url(#${clip})` });
    for (const curve of shown) this.drawCurve(group, curve);
    this.marks = add(this.svg, "g");
  }

  /** Choose the domains, the frame and the maps from values to pixels. */
  scale() {
    const { log, categories } = this.figure.x;
    // Also positions without a finite value: plots of one run end at the same step.
    const [first, last] = minMax(this.drawn.flatMap((curve) => (curve.visible ? curve.x.filter((x) => x !== null) : [])));
    if (categories) this.domain = [-0.5, categories.length - 0.5];
    else if (log) this.domain = [first / 1.2, last * 1.2];
    else if (this.figure.pad) this.domain = [first - 0.04 * (last - first || 1), last + 0.04 * (last - first || 1)];
    else this.domain = [Math.min(first, first > last / 2 && last > first ? first : 0), last]; // from step 0
    if (this.zoom) this.domain = this.zoom;
    if (this.domain[0] === this.domain[1]) this.domain = [this.domain[0] - 0.5, this.domain[1] + 0.5];
    const visible = this.points.filter((point) => point.x >= this.domain[0] && point.x <= this.domain[1]);
    this.range = this.verticalRange((visible.length ? visible : this.points).map((point) => point.y));
    const height = this.size.height - 52;
    const ticks = niceTicks(...this.range, height / 48);
    const label = tickLabels(ticks, this.figure.format);
    this.yTicks = ticks.ticks.map((tick) => [tick, label(tick)]);
    const longest = Math.max(...this.yTicks.map(([, text]) => text.length));
    const left = Math.max(34, 7 * longest + 14);
    this.frame = { left, top: 10, width: Math.max(20, this.size.width - left - 14), height: Math.max(20, height) };
  }

  verticalRange(values) {
    let [low, high] = minMax(values);
    if (this.figure.fromZero) [low, high] = [Math.min(0, low), Math.max(0, high)];
    const pad = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 0.5;
    [low, high] = [this.figure.fromZero && low === 0 ? 0 : low - pad, high + pad];
    return this.figure.format === "percent" ? [Math.max(0, low), Math.min(Math.max(1, high - pad), high)] : [low, high];
  }

  px(x) {
    const to = this.figure.x.log ? Math.log10 : (value) => value;
    const [low, high] = this.domain.map(to);
    return this.frame.left + ((to(x) - low) / (high - low)) * this.frame.width;
  }

  py(y) {
    const [low, high] = this.range;
    return this.frame.top + (1 - (y - low) / (high - low)) * this.frame.height;
  }

  drawAxes() {
    const { left, top, width, height } = this.frame;
    for (const [tick, label] of this.yTicks) {
      add(this.svg, "line", { class: "grid", x1: left, x2: left + width, y1: this.py(tick), y2: this.py(tick) });
      add(this.svg, "text", { class: "y-tick", x: left - 7, y: this.py(tick) + 4, "text-anchor": "end" }, label);
    }
    for (const [value, label] of this.xTicks()) {
      const x = this.px(value);
      add(this.svg, "line", { class: "grid", x1: x, x2: x, y1: top, y2: top + height });
      add(this.svg, "text", { class: "x-tick", x, y: top + height + 16, "text-anchor": "middle" }, label);
    }
    const title = { class: "x-title", x: left + width / 2, y: this.size.height - 6, "text-anchor": "middle" };
    add(this.svg, "text", title, this.figure.axes[this.axis]);
  }

  xTicks() {
    const { log, categories } = this.figure.x;
    if (categories) {
      const most = Math.max(3, Math.floor(this.frame.width / categories.length / 7));
      return categories.map((name, i) => [i, shorten(name, most)]);
    }
    const [low, high] = this.domain;
    if (log) return logTicks(low, high).map((tick) => [tick, general(tick)]);
    const ticks = niceTicks(low, high, this.frame.width / 100, INTEGER_AXES.has(this.axis));
    const label = tickLabels(ticks, "number");
    return ticks.ticks.map((tick) => [tick, label(tick)]);
  }

  /** A path with gaps; points without neighbors, which a path does not show, become circles; a single one has its value. */
  drawCurve(parent, curve) {
    const group = add(parent, "g", { class: `curve ${curve.style}${curve.faint ? " faint" : ""}` });
    group.style.setProperty("--color", curve.color);
    const places = curve.x.map((x, i) => (x === null || curve.y[i] === null ? null : [this.px(x), this.py(curve.y[i])]));
    if (curve.style !== "scatter") {
      let path = "";
      places.forEach((place, i) => {
        if (!place) return;
        const [x, y] = place.map((pixel) => pixel.toFixed(1));
        if (!places[i - 1]) path += `M${x} ${y}`;
        else path += curve.style === "stairs" ? `H${x}V${y}` : `L${x} ${y}`;
      });
      add(group, "path", { d: path, ...(curve.dash ? { "stroke-dasharray": curve.dash } : {}) });
    }
    const markers = ["points", "ema", "scatter"].includes(curve.style);
    places.forEach((place, i) => {
      if (!place || curve.faint) return;
      if (markers || (!places[i - 1] && !places[i + 1])) add(group, "circle", { cx: place[0], cy: place[1], r: { scatter: 4.5, ema: 4 }[curve.style] ?? 3.2 });
    });
    const seen = places.filter(Boolean);
    if (seen.length !== 1 || curve.faint || curve.style === "scatter") return;
    const [[x, y]] = seen;
    const onLeft = x > this.frame.left + this.frame.width / 2;
    const text = FORMATS[this.figure.format](curve.y.find((value) => value !== null));
    add(group, "text", { x: x + (onLeft ? -9 : 9), y: y + 4, "text-anchor": onLeft ? "end" : "start" }, text);
  }

  // ------------------------------------------------------------------------------------------------- reading values

  point(event) {
    const { x, y } = this.place(event);
    if (this.drag) this.drawZoom(x);
    if (!this.points?.length || !this.frame) return;
    const byPoint = this.figure.hover === "point";
    const away = (p) => Math.abs(this.px(p.x) - x) + (byPoint ? Math.abs(this.py(p.y) - y) : 0);
    const near = this.points.reduce((best, p) => (away(p) < away(best) ? p : best));
    if (byPoint && away(near) > 3 * REACH) this.leave();
    else this.show(near, y);
  }

  move(key) {
    if (!this.points?.length || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(key)) return false;
    const byPoint = this.figure.hover === "point";
    const stops = [...this.points].sort((a, b) => a.x - b.x).filter((p, i, all) => byPoint || !i || p.x !== all[i - 1].x);
    const at = this.cursor ? stops.findIndex((p) => (byPoint ? p === this.cursor : p.x === this.cursor.x)) : -1;
    const to = { ArrowLeft: at < 0 ? stops.length - 1 : at - 1, ArrowRight: at + 1, Home: 0, End: stops.length - 1 }[key];
    this.show(stops[Math.max(0, Math.min(stops.length - 1, to))], this.frame.top);
    return true;
  }

  /** Show the values of all curves at a point, or what is known about that point. */
  show(at, y) {
    this.leave();
    this.cursor = at;
    const { top, height } = this.frame;
    const x = this.px(at.x);
    const near = this.figure.hover === "point" ? [at] : this.nearest(at);
    if (this.figure.hover !== "point") add(this.marks, "line", { class: "cursor", x1: x, x2: x, y1: top, y2: top + height });
    for (const p of near) add(this.marks, "circle", { class: "mark", cx: this.px(p.x), cy: this.py(p.y), r: 4.5 }).style.setProperty("--color", p.curve.color);
    this.tell(x, y - 20, this.figure.hover === "point" ? pointLines(at) : this.valueLines(at, near));
  }

  /** The point of each curve that is closest to the horizontal place of `at`. */
  nearest(at) {
    const best = new Map();
    for (const p of this.points) {
      if (p.curve.faint) continue;
      const away = Math.abs(this.px(p.x) - this.px(at.x));
      if (away <= REACH / 2 && away < (best.get(p.curve)?.away ?? Infinity)) best.set(p.curve, { ...p, away });
    }
    return [...best.values()];
  }

  valueLines(at, near) {
    const format = FORMATS[this.figure.format];
    const place = INTEGER_AXES.has(this.axis) ? Math.round(at.x).toLocaleString("en-US") : general(at.x);
    return [
      { text: `${this.figure.axes[this.axis]} ${place}`, strong: true },
      ...near.map(({ curve, y, i }) => {
        const logged = curve.logged ? ` (logged ${format(curve.logged[i])})` : "";
        return { text: `${curve.name} ${format(y)}${logged}`, color: curve.color };
      }),
    ];
  }

  // -------------------------------------------------------------------------------------------------------- zooming

  /** A mouse drags to zoom; on touch screens dragging scrolls the page. */
  startZoom(event) {
    if (event.pointerType !== "mouse" || event.button || !this.frame || this.figure.x.categories || this.figure.x.log) return;
    this.drag = { from: this.place(event).x };
    this.element.setPointerCapture(event.pointerId);
  }

  drawZoom(x) {
    this.drag.box?.remove();
    const [from, to] = [Math.min(this.drag.from, x), Math.max(this.drag.from, x)];
    const { top, height } = this.frame;
    this.drag.box = add(this.svg, "rect", { class: "zoom", x: from, width: to - from, y: top, height });
  }

  endZoom(event) {
    if (!this.drag) return;
    const [from, to] = [this.drag.from, this.place(event).x].sort((a, b) => a - b);
    this.drag.box?.remove();
    this.drag = null;
    const [low, high] = this.domain;
    const value = (x) => low + ((x - this.frame.left) / this.frame.width) * (high - low);
    if (to - from > 8) this.zoomTo([Math.max(low, value(from)), Math.min(high, value(to))]);
  }

  zoomTo(domain) {
    this.zoom = domain;
    this.draw();
  }

  escape() {
    this.zoomTo(null);
    return true;
  }
}

let clipped = 0;

function minMax(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function pointLines({ curve, i }) {
  return curve.texts[i].map((text, line) => ({ text, strong: line === 0 }));
}

/** 1, 10, 100, ...; also 2 and 5 times these if there are few of them; round numbers within less than that. */
function logTicks(low, high) {
  const powers = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) powers.push(10 ** p);
  const inside = (ticks) => ticks.filter((tick) => tick >= low && tick <= high);
  const few = inside(powers);
  if (few.length > 2) return few;
  const more = inside(powers.flatMap((power) => [power, 2 * power, 5 * power]));
  return more.length > 1 ? more : niceTicks(low, high, 3).ticks;
}

// ------------------------------------------------------------------------------------------------ confusion matrices

/** Rows are true classes, columns predictions; the strength of a color is the fraction of its row. */
class Matrix extends Chart {
  constructor(element, figure, view) {
    super(element, figure, view);
    this.total = figure.classes.map(() => 0);
    for (const [row, , count] of figure.cells) this.total[row] += count;
    this.count = new Map(figure.cells.map(([row, column, count]) => [`${row},${column}`, count]));
    this.draw();
  }

  draw() {
    this.clear();
    const { classes, cells } = this.figure;
    const named = classes.length <= this.figure.namesUpTo;
    const longest = named ? Math.max(...classes.map((name) => Math.min(12, name.length))) : 0;
    const margin = 26 + 7 * longest;
    const side = Math.max(40, Math.min(this.size.width - margin - 4, this.size.height - (longest > 3 ? margin : 44) - 4));
    const cell = side / classes.length;
    const left = margin + (this.size.width - margin - side) / 2;
    this.frame = { left, top: 4, side, cell };
    add(this.svg, "rect", { class: "ground", x: left, y: 4, width: side, height: side });
    for (const [row, column, count] of cells) this.drawCell(row, column, count, named);
    if (named) classes.forEach((name, i) => this.drawName(name, i, longest > 3));
    const below = 4 + side + (longest > 3 ? margin - 8 : 36);
    add(this.svg, "text", { class: "x-title", x: left + side / 2, y: below, "text-anchor": "middle" }, "predicted");
    const turned = `translate(${left - margin + 14} ${4 + side / 2}) rotate(-90)`;
    add(this.svg, "text", { class: "x-title", transform: turned, "text-anchor": "middle" }, "true");
    this.marks = add(this.svg, "g");
  }

  drawCell(row, column, count, named) {
    const { left, top, cell } = this.frame;
    const [x, y] = [left + column * cell, top + row * cell];
    const fraction = count / Math.max(1, this.total[row]);
    // The square root makes an error of 1% visible.
    const shade = row === column ? fraction : Math.sqrt(fraction);
    const gap = named ? 1 : 0;
    const kind = row === column ? "correct" : "error";
    add(this.svg, "rect", { class: kind, x, y, width: Math.max(0.6, cell - gap), height: Math.max(0.6, cell - gap), "fill-opacity": shade.toFixed(3) });
    const text = count.toLocaleString("en-US");
    if (!named || cell < 15 || 7 * text.length > cell) return;
    const strong = shade > 0.5 ? ` on-${kind}` : "";
    add(this.svg, "text", { class: `count${strong}`, x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle" }, text);
  }

  drawName(name, i, upright) {
    const { left, top, side, cell } = this.frame;
    if (cell < 11) return;
    const at = (i + 0.5) * cell;
    const short = shorten(name, 12);
    add(this.svg, "text", { class: "y-tick", x: left - 6, y: top + at + 4, "text-anchor": "end" }, short);
    const below = upright
      ? { transform: `translate(${left + at + 4} ${top + side + 8}) rotate(-90)`, "text-anchor": "end" }
      : { x: left + at, y: top + side + 16, "text-anchor": "middle" };
    add(this.svg, "text", { class: "x-tick", ...below }, short);
  }

  point(event) {
    const { x, y } = this.place(event);
    const { left, top, side, cell } = this.frame;
    if (x < left || x >= left + side || y < top || y >= top + side) this.leave();
    else this.show(Math.floor((y - top) / cell), Math.floor((x - left) / cell));
  }

  move(key) {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
    if (!step) return false;
    const limit = (value) => Math.max(0, Math.min(this.figure.classes.length - 1, value));
    const [row, column] = this.cursor ?? [0, 0];
    this.show(...(this.cursor ? [limit(row + step[0]), limit(column + step[1])] : [0, 0]));
    return true;
  }

  /** Show `2 of 37 (5.4%): 9 classified as 1`. */
  show(row, column) {
    this.leave();
    this.cursor = [row, column];
    const { left, top, cell } = this.frame;
    const { classes } = this.figure;
    const [count, total] = [this.count.get(`${row},${column}`) ?? 0, this.total[row]];
    const [x, y] = [left + column * cell, top + row * cell];
    add(this.marks, "rect", { class: "chosen", x, y, width: cell, height: cell });
    const fraction = `${((100 * count) / Math.max(1, total)).toFixed(1)}%`;
    const outcome = row === column ? "classified correctly" : `classified as ${classes[column]}`;
    const counted = `${count.toLocaleString("en-US")} of ${total.toLocaleString("en-US")} (${fraction})`;
    this.tell(x + cell, y, [{ text: counted, strong: true }, { text: `${classes[row]} ${outcome}` }]);
  }
}

/** Draw all charts of the page. */
function drawCharts(figures, view) {
  const kinds = { lines: Lines, matrix: Matrix };
  return [...document.querySelectorAll(".chart")].map((element) => {
    const figure = figures[element.dataset.figure];
    return new kinds[figure.kind](element, figure, view);
  });
}
