// The controls of the page: hide a run everywhere, smooth, switch the horizontal axis.
"use strict";

const slider = document.getElementById("smoothing");
const axisMenu = document.getElementById("axis");
const view = { axis: "step", smoothing: 0, hidden: new Set() };

function readControls() {
  if (!slider) return;
  view.smoothing = Number(slider.value);
  view.axis = axisMenu.value;
  document.getElementById("amount").textContent = view.smoothing.toFixed(2);
}

readControls();
const charts = drawCharts(JSON.parse(document.getElementById("figures").textContent), view);

function redraw() {
  readControls();
  for (const chart of charts) chart.draw();
}

function toggle(button) {
  const run = Number(button.dataset.toggle);
  const shown = view.hidden.delete(run) || !view.hidden.add(run);
  button.setAttribute("aria-pressed", String(shown));
  for (const element of document.querySelectorAll(`[data-run="${run}"]`)) element.hidden = !shown;
  redraw();
}

for (const button of document.querySelectorAll("[data-toggle]")) button.addEventListener("click", () => toggle(button));
slider?.addEventListener("input", redraw);
axisMenu?.addEventListener("change", redraw);
