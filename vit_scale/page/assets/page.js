// Draws the figures of the page, and redraws them when a run is hidden, the axis is switched or the slider moves.
"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const slider = document.getElementById("smoothing");
const axisMenu = document.getElementById("axis");
const hidden = new Set();

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

/** The traces to draw for a curve: the smoothed values over the logged ones, or the logged ones only. */
function tracesOf(trace) {
  const { run, smooth, x } = trace.meta;
  const axis = axisMenu.value;
  const weight = Number(slider.value);
  const drawn = { ...trace, x: axis === "step" ? trace.x : x[axis] ?? [], visible: !hidden.has(run) };
  if (!smooth || weight === 0 || trace.y.length < 3) return [drawn];
  const faint = { ...drawn, opacity: 0.22, hoverinfo: "skip", hovertemplate: null, line: { ...trace.line, width: 1 } };
  const template = trace.hovertemplate + " <i>logged " + trace.hovertemplate.replace("%{y", "%{customdata") + "</i>";
  return [faint, { ...drawn, y: smoothed(trace.y, weight), customdata: trace.y, hovertemplate: template }];
}

function colors() {
  const style = getComputedStyle(document.body);
  const of = (name) => style.getPropertyValue(name).trim();
  return { text: of("--text"), quiet: of("--quiet"), grid: of("--line"), paper: of("--card"), correct: of("--correct"), error: of("--error") };
}

function baseLayout() {
  const { text, quiet, grid, paper } = colors();
  const numbers = { exponentformat: "power", separatethousands: true, tickfont: { color: quiet } };
  const axis = { ...numbers, gridcolor: grid, linecolor: grid, zeroline: false, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: text },
    margin: { l: 48, r: 12, t: 8, b: 40 },
    showlegend: false,
    hoverlabel: { bgcolor: paper, bordercolor: grid, font: { color: text, size: 12 }, namelength: -1 },
    // On touch screens dragging scrolls the page; with a mouse it zooms.
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...axis },
    yaxis: { ...axis },
  };
}

function merged(below, above) {
  const both = { ...below };
  for (const [key, value] of Object.entries(above ?? {})) {
    const nested = value && typeof value === "object" && !Array.isArray(value);
    both[key] = nested ? merged(below?.[key] ?? {}, value) : value;
  }
  return both;
}

function xaxisOf(name, title) {
  const { quiet } = colors();
  return {
    title: { text: title, standoff: 6, font: { color: quiet } },
    unifiedhovertitle: { text: `${title} <b>%{x}</b>` },
    hoverformat: name === "step" || name === "images" ? ",.0f" : ".2f",
    tickformat: { step: ",~r", images: "~s" }[name] ?? "",
    spikecolor: quiet,
    spikethickness: 1,
    spikedash: "solid",
  };
}

function curvesNow(figure) {
  const layout = merged(baseLayout(), figure.layout);
  layout.hovermode = "x unified";
  layout.uirevision = axisMenu.value; // smoothing preserves the zoom, switching the axis resets it
  Object.assign(layout.xaxis, xaxisOf(axisMenu.value, figure.layout.meta.axes[axisMenu.value]));
  return [figure.data.flatMap(tracesOf), layout];
}

function matrixNow(figure) {
  const { paper, correct, error } = colors();
  const layout = merged(baseLayout(), figure.layout);
  layout.margin = { l: 60, r: 8, t: 8, b: 56 };
  for (const axis of [layout.xaxis, layout.yaxis]) Object.assign(axis, { showgrid: false, showline: false });
  return [figure.data.map((trace) => ({ ...trace, colorscale: [[0, error], [0.5, paper], [1, correct]] })), layout];
}

function draw() {
  if (slider) document.getElementById("amount").textContent = Number(slider.value).toFixed(2);
  const config = { responsive: true, displayModeBar: false };
  for (const element of plots) {
    const figure = figures[element.dataset.figure];
    const [traces, layout] = element.classList.contains("matrix") ? matrixNow(figure) : curvesNow(figure);
    Plotly.react(element, traces, layout, config);
  }
}

function toggle(button) {
  const run = Number(button.dataset.toggle);
  const shown = hidden.delete(run) || !hidden.add(run);
  button.setAttribute("aria-pressed", String(shown));
  for (const element of document.querySelectorAll(`[data-run="${run}"]`)) element.hidden = !shown;
  draw();
}

for (const button of document.querySelectorAll("[data-toggle]")) button.addEventListener("click", () => toggle(button));
slider?.addEventListener("input", draw);
axisMenu?.addEventListener("change", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
