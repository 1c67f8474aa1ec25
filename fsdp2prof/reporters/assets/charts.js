"use strict";
// Charts are made for light paper; on a dark page some of their colours become others.
const [figures, dark] = ["figures", "dark"].map(id => JSON.parse(document.getElementById(id).textContent));
const inTheDark = matchMedia("(prefers-color-scheme: dark)");
const config = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
};

function recoloured(value) {
  if (Array.isArray(value)) return value.map(recoloured);
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, recoloured(item)]));
  }
  return Object.hasOwn(dark, value) ? dark[value] : value;
}

function drawOne(place) {
  const figure = figures[place.dataset.figure];
  const { data, layout } = inTheDark.matches ? recoloured(figure) : structuredClone(figure);
  if (place.clientWidth < 640) {
    layout.height += 19 * data.length;  // the legend has one entry a line
  }
  Plotly.react(place, data, layout, config);
}

function draw() {
  const places = [...document.querySelectorAll("[data-figure]")].filter(place => !place.closest("[data-timeline]"));
  work.push(oneByOne(places, drawOne));
}

draw();
inTheDark.addEventListener("change", draw);
