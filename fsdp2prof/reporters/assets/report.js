"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const config = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
};
for (const place of document.querySelectorAll("[data-figure]")) {
  const figure = figures[Number(place.dataset.figure)];
  if (place.clientWidth < 640) {
    figure.layout.height += 19 * figure.data.length;  // the legend has one entry a line
  }
  Plotly.newPlot(place, figure.data, figure.layout, config);
}
