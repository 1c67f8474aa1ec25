"use strict";
// Charts are made for light paper; these of their colours follow the page.
const themed = {
  "#1f2933": "--ink", "#9aa5b1": "--soft", "#e4e7eb": "--line", "#ffffff": "--paper", "#d3d3d3": "--pale",
};
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
};

function inTheme(value, style) {
  if (Array.isArray(value)) return value.map(item => inTheme(item, style));
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, inTheme(item, style)]));
  }
  return Object.hasOwn(themed, value) ? style.getPropertyValue(themed[value]).trim() : value;
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  for (const place of document.querySelectorAll("[data-figure]")) {
    const { data, layout } = inTheme(figures[place.dataset.figure], style);
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.modebar = {
      bgcolor: "rgba(0,0,0,0)",
      color: style.getPropertyValue("--soft").trim(),
      activecolor: style.getPropertyValue("--ink").trim(),
    };
    if (place.clientWidth < 640) {
      layout.height += 19 * data.length;  // the legend has one entry a line
    }
    Plotly.react(place, data, layout, config);
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
