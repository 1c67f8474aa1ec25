"use strict";
// A step's timeline. Of the spans in view as much is drawn as there are pixels: each pixel of a lane is what runs
// longest in it, so a step of any size pans and zooms alike.
const MS = 1e6;
const NARROW = 640, ROW_HEIGHT = 18, MARGIN = 84;
const LEAST_TEXT = 46, TEXT_WIDTH = 6.3, TEXTS = 250, ARROWS = 30, HATCHED = 300;
const ON_PALE = "#1f2933";
const SEEN_FIRST = 0.25;  // of the step
const MOST_ROWS = 48;  // from which on a column is wider than a pixel
const BELOW_COMPUTE = ["memcpy", "other_comm", "all_reduce", "reduce_scatter", "all_gather", "fsdp_copy", "compute"];

const milliseconds = ns => `${(ns / MS).toLocaleString("en", { maximumSignificantDigits: 4 })} ms`;
const mebibytes = bytes => `${(bytes / 2 ** 20).toLocaleString("en", { maximumSignificantDigits: 4 })} MiB`;
const escaped = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
// A module that fits whole, else its last parts; nothing where these do not fit or are a bare number.
const fittingModule = (fqn, most) => {
  let rest = fqn;
  while (rest.length > most) {
    const cut = rest.search(/[.:]\w/);
    if (cut < 0) return "";
    rest = rest.slice(cut + 1);
  }
  return /^[\d.:]+$/.test(rest) ? "" : rest;
};

function unpack([key, gaps, ...columns]) {
  const length = Math.max(gaps.length, ...columns.map(column => column.length));
  const at = column => (column.length === 1 ? () => column[0] : i => column[i] ?? -1);
  const [gap, duration, idle, count, layer, phase, name, payload, wait] = [gaps, ...columns].map(at);
  const spans = [];
  let end = 0;
  for (let i = 0; i < length; i += 1) {
    const start = end + gap(i);
    end = start + duration(i);
    spans.push({
      start, end, busy: duration(i) - idle(i), count: count(i), layer: layer(i), phase: phase(i), name: name(i),
      payload: payload(i), wait: wait(i),
    });
  }
  return { key, spans };
}

class Timeline {
  constructor(box, figure, detail) {
    this.box = box;
    this.place = box.querySelector(".chart");
    this.status = box.querySelector("[role=status]");
    this.figure = figure;
    this.lanes = new Map(detail.lanes.map(lane => [lane.key, lane]));
    this.detail = detail;
    this.sides = detail.sides.map(side => ({
      ...side,
      ranks: side.ranks.map(rank => ({
        ...rank,
        side,
        lanes: rank.lanes.map(unpack),
        stalls: rank.stalls.map(([lane, layer, phase, start, end, needed, length, cause]) => (
          { lane, layer, phase, start, end, needed, until: needed + length, length, cause }
        )),
      })),
    }));
    this.ranks = this.sides.flatMap(side => side.ranks);
    this.total = Math.max(...detail.sides.map(side => side.duration));
    this.first = Math.min(0, ...this.ranks.flatMap(rank => rank.lanes.map(lane => lane.spans[0].start)));
    this.view = [Math.max(this.first, -0.02 * this.total), this.total];  // hosts may run far ahead
    this.stalls = this.ranks.flatMap(rank => rank.stalls.map(stall => ({ ...stall, rank })));
    this.stalls.sort((a, b) => b.length - a.length);
    this.worst = -1;
    this.controls();
    this.arrange("most");
    this.drawn = this.paint();
    this.listen();
    this.begin();
  }

  // What is shown.

  title(rank) {
    return `${rank.side.name} rank ${rank.rank}`.trim();
  }

  layer(side, index) {
    const fqn = index < 0 ? null : side.layers[index];
    return fqn === null || fqn === undefined ? "(no layer)" : fqn === "" || fqn.endsWith(":") ? `${fqn}(root)` : fqn;
  }

  choose(what) {
    this.arrange(what);
    this.draw();
  }

  most() {
    return widthOf(this.place) < NARROW ? 1 : this.sides.length > 1 ? 2 : 3;
  }

  arrange(what) {
    this.chosen = what;
    const most = this.most();
    const waited = rank => rank.stalls.reduce((sum, stall) => sum + stall.length, 0);
    let ranks = this.ranks;
    if (what === "most") {
      ranks = this.sides.flatMap(side => {
        const late = rank => (this.detail.first.indexOf(rank.rank) + 1 || Infinity);
        const order = (a, b) => Math.sign(late(a) - late(b)) || waited(b) - waited(a);
        const kept = new Set([...side.ranks].sort(order).slice(0, most));
        return side.ranks.filter(rank => kept.has(rank));
      });
    } else if (what !== "all") {
      ranks = [this.ranks[Number(what)]];
    }
    this.rows = what === "all"
      ? ranks.map(rank => ({ rank, lanes: rank.lanes.filter(lane => lane.key !== "host"), label: this.title(rank) }))
      : ranks.flatMap(rank => rank.lanes.filter(lane => lane.spans.length).map((lane, i) => {
        const label = this.lanes.get(lane.key).label;
        return { rank, lanes: [lane], key: lane.key, label: i ? label : `<b>${escaped(this.title(rank))}</b>  ${label}` };
      }));
    this.select.value = what;
  }

  code(row, lane, span) {
    if (lane.key !== "host") return this.lanes.get(lane.key).codes[Math.abs(span.layer) % 2];
    const codes = this.detail.host_codes;
    return codes[row.rank.side.phases[span.phase]] ?? codes.other;
  }

  // Each pixel of a row: what runs longest in it, compute before what it hides.
  pixels(row, from, to, count) {
    const width = (to - from) / count;
    const codes = new Array(count).fill(null);
    const kept = new Float64Array(count);
    const paint = (start, end, code, covered) => {
      const first = Math.max(0, Math.floor((start - from) / width));
      const last = Math.min(count - 1, Math.floor((end - from) / width));
      for (let i = first; i <= last; i += 1) {
        const part = Math.min(end, from + (i + 1) * width) - Math.max(start, from + i * width);
        if (part > covered[i]) {
          covered[i] = part;
          codes[i] = code;
        }
      }
    };
    const lanes = row.key ? row.lanes : BELOW_COMPUTE.map(key => row.lanes.find(lane => lane.key === key));
    for (const lane of lanes) {
      if (!lane) continue;
      const covered = row.key ? kept : new Float64Array(count).fill(width / 2);
      const waiting = this.detail.waiting_codes[lane.key];
      for (const span of lane.spans) {
        if (span.end < from || span.start > to) continue;
        const alone = row.key && span.wait > 0 ? Math.min(span.end, span.start + span.wait) : span.start;
        if (alone > span.start) paint(span.start, alone, waiting, covered);
        paint(alone, span.end, this.code(row, lane, span), covered);
      }
    }
    return codes;
  }

  // Once a frame, however many moves there are in it.
  draw() {
    if (this.awaited) return;
    this.awaited = true;
    this.drawn = new Promise(done => { requestAnimationFrame(done); }).then(() => this.paint());
  }

  paint() {
    this.awaited = false;
    const [low, high] = this.view;
    const margin = (high - low) / 2;  // is there already when the view is dragged
    const from = Math.max(this.first, low - margin), to = Math.min(this.total, high + margin);
    const pixels = Math.max(200, widthOf(this.place) - 160) * Math.min(1, MOST_ROWS / this.rows.length);
    const count = Math.max(1, Math.round(pixels * (to - from) / (high - low)));
    const { data: [base], layout: given } = isDark() ? recoloured(this.figure) : structuredClone(this.figure);
    const [ink, paper, stalled] = ["ink", "paper", "stall"].map(key => (
      isDark() ? dark[this.detail[key]] ?? this.detail[key] : this.detail[key]
    ));
    const width = (to - from) / count;
    const heatmap = {
      ...base,
      z: this.rows.map(row => this.pixels(row, from, to, count)),
      x0: (from + width / 2) / MS,
      dx: width / MS,
      y: this.rows.map((_, i) => i),
      hoverinfo: "none",
      hovertemplate: null,
      ygap: this.chosen === "all" ? 0 : 2,
    };
    const rows = this.rows.length;
    const layout = {
      ...given,
      height: rows * ROW_HEIGHT + MARGIN,
      dragmode: "pan",
      hovermode: "closest",
      showlegend: false,
      barmode: "overlay",
      xaxis: { ...given.xaxis, range: [low / MS, high / MS], minallowed: this.first / MS, maxallowed: this.total / MS },
      yaxis: {
        ...given.yaxis,
        range: [rows - 0.5, -0.5],
        autorange: false,
        ticklabeloverflow: "allow",  // or each label is measured in every draw
        tickvals: this.rows.map((_, i) => i),
        ticktext: this.rows.map(row => row.label),
      },
      annotations: this.arrows(low, high, stalled),
      shapes: this.edges(paper, ink),
    };
    const texts = this.texts(low, high, ink, paper);
    if (printing) layout.width = PAPER_WIDTH;
    this.place.style.minHeight = `${layout.height}px`;
    return Plotly.react(this.place, [heatmap, this.hatched(from, to, width, stalled), texts], layout, {
      ...config, modeBarButtons: [["toImage"], ["zoom2d", "pan2d"]],
    });
  }

  row(rank, key) {
    return this.rows.findIndex(row => row.rank === rank && (!row.key || row.key === key));
  }

  stallsIn(from, to, least) {
    const shown = this.stalls.filter(stall => (
      stall.until > from && stall.needed < to && stall.length >= least && this.row(stall.rank, "compute") >= 0
    ));
    return shown;  // longest first
  }

  hatched(from, to, width, colour) {
    const stalls = this.stallsIn(from, to, 2 * width).slice(0, HATCHED);
    return {
      type: "bar", orientation: "h", name: "stalls",
      base: stalls.map(stall => stall.needed / MS),
      x: stalls.map(stall => stall.length / MS),
      y: stalls.map(stall => this.row(stall.rank, "compute")),
      width: 0.88, hoverinfo: "skip",
      marker: {
        color: "rgba(0,0,0,0)", line: { color: colour, width: 1 },
        pattern: { shape: "/", fgcolor: colour, bgcolor: "rgba(0,0,0,0)", size: 5, solidity: 0.25 },
      },
    };
  }

  texts(low, high, ink, paper) {
    const pixel = (high - low) / Math.max(200, widthOf(this.place) - 160);
    const found = [];
    this.rows.forEach((row, y) => {
      if (!row.key) return;
      let before = null;  // neighbours of one layer share a name
      for (const span of row.lanes[0].spans) {
        const start = Math.max(span.start, low), end = Math.min(span.end, high);
        if (end <= start) continue;
        if (before && before.span.layer === span.layer && before.span.phase === span.phase
            && start - before.end < 4 * pixel) before.end = Math.max(before.end, end);
        else found.push(before = { y, start, end, span, row });
      }
    });
    found.sort((a, b) => (b.end - b.start) - (a.end - a.start));
    const shown = found.filter(({ start, end }) => end - start >= LEAST_TEXT * pixel).slice(0, TEXTS);
    return {
      type: "scatter", mode: "text", name: "layers", hoverinfo: "skip", cliponaxis: true,
      x: shown.map(({ start, end }) => (start + end) / 2 / MS),
      y: shown.map(({ y }) => y),
      text: shown.map(({ start, end, span, row }) => {
        const most = Math.floor((end - start) / pixel / TEXT_WIDTH);
        if (span.layer >= 0 && row.rank.side.layers[span.layer] !== null) {
          return escaped(fittingModule(this.layer(row.rank.side, span.layer), most));
        }
        const name = row.rank.side.names[span.name] ?? "";
        return name.length > most ? "" : escaped(name);
      }),
      textfont: { size: 11, color: shown.map(({ row, span }) => (
        row.key === "host" ? ink : span.wait > (span.end - span.start) / 2 ? ON_PALE : "#ffffff"
      )) },
    };
  }

  // From the end of a collective to the compute stream that stood still for it.
  arrows(low, high, colour) {
    const pixel = (high - low) / Math.max(200, widthOf(this.place) - 160);
    return this.stallsIn(low, high, 3 * pixel).slice(0, ARROWS).flatMap(stall => {
      const to = this.row(stall.rank, "compute"), from = this.row(stall.rank, stall.lane);
      if (from === to || from < 0) return [];
      return [{
        x: stall.until / MS, y: to, ax: stall.end / MS, ay: from, axref: "x", ayref: "y", xref: "x", yref: "y",
        showarrow: true, arrowhead: 2, arrowsize: 1, arrowwidth: 1.5, arrowcolor: colour, text: "",
      }];
    });
  }

  // Where each rank's step begins and ends, and a line between ranks.
  edges(paper, ink) {
    const shapes = [];
    if (this.mark) {
      const marked = this.rows.flatMap((row, i) => (row.rank === this.mark.rank ? [i] : []));
      if (marked.length) {
        shapes.push({
          type: "rect", x0: this.mark.from / MS, x1: this.mark.to / MS, y0: marked[0] - 0.5, y1: marked.at(-1) + 0.5,
          line: { color: ink, width: 2 },
        });
      }
    }
    this.rows.forEach((row, i) => {
      const first = i === 0 || this.rows[i - 1].rank !== row.rank;
      if (!row.key || !first) return;
      const rows = this.rows.filter(other => other.rank === row.rank).length;
      for (const x of [row.rank.start, row.rank.start + row.rank.duration]) {
        shapes.push({
          type: "line", x0: x / MS, x1: x / MS, y0: i - 0.5, y1: i + rows - 0.5, line: { color: ink, width: 1, dash: "dot" },
        });
      }
      if (i) {
        shapes.push({
          type: "line", xref: "paper", x0: 0, x1: 1, y0: i - 0.5, y1: i - 0.5, line: { color: ink, width: 0.5 },
        });
      }
    });
    return shapes;
  }

  // What is under the pointer, in words.

  at(row, time, tolerance) {
    const stall = (!row.key || row.key === "compute")
      && row.rank.stalls.find(one => one.needed <= time && time <= one.until);
    if (stall) return this.saysStall(row.rank, stall);
    const lanes = row.key ? row.lanes : BELOW_COMPUTE.toReversed().map(key => row.lanes.find(lane => lane.key === key));
    for (const lane of lanes) {
      const near = (lane?.spans ?? []).filter(span => span.start - tolerance <= time && time <= span.end + tolerance);
      near.sort((a, b) => (b.end - b.start) - (a.end - a.start));
      const exact = near.find(span => span.start <= time && time <= span.end) ?? near[0];
      if (exact) return this.saysSpan(row.rank, lane, exact);
    }
    return null;
  }

  saysSpan(rank, lane, span) {
    const { side } = rank;
    const name = side.names[span.name] ?? "";
    const lines = [
      `${this.title(rank)}, ${this.lanes.get(lane.key).label}: ${this.layer(side, span.layer)}, ${side.phases[span.phase]}`,
      `${milliseconds(span.end - span.start)} from ${milliseconds(span.start)}`,
    ];
    if (lane.key === "host" || name !== lane.key) lines.push(name.replaceAll("_", " ").slice(0, 120));
    if (span.count > 1) {
      const busy = Math.round(100 * span.busy / Math.max(1, span.end - span.start));
      lines.push(`${span.count.toLocaleString("en")} together, busy ${busy}%; the longest is named`);
    }
    if (span.payload >= 0) lines.push(`payload ${mebibytes(span.payload)}`);
    if (span.wait > 0) lines.push(`${milliseconds(span.wait)} of it waiting for the last rank`);
    return lines;
  }

  saysStall(rank, stall) {
    const cause = this.detail.causes[stall.cause];
    return [
      `${this.title(rank)} waited ${milliseconds(stall.length)} for the ${this.lanes.get(stall.lane).label} of `
      + `${this.layer(rank.side, stall.layer)} in ${rank.side.phases[stall.phase] ?? "other"}${cause ? `: ${cause}` : ""}`,
      `needed at ${milliseconds(stall.needed)}; the collective ran from ${milliseconds(stall.start)} to ${milliseconds(stall.end)}`,
    ];
  }

  // Moving about.

  look(low, high) {
    const length = Math.max(1000, Math.min(this.total - this.first, high - low));
    const start = Math.max(this.first, Math.min(this.total - length, low));
    this.view = [start, start + length];
    this.draw();
  }

  zoom(factor, around) {
    const [low, high] = this.view;
    const centre = around ?? (low + high) / 2;
    this.look(centre - (centre - low) * factor, centre + (high - centre) * factor);
  }

  pan(part) {
    const [low, high] = this.view;
    this.look(low + part * (high - low), high + part * (high - low));
  }

  showWorst() {
    this.worst = (this.worst + 1) % this.stalls.length;
    const stall = this.stalls[this.worst];
    const from = Math.min(stall.needed, stall.start), to = Math.max(stall.until, stall.end);
    this.view = [from, to];
    if (this.row(stall.rank, "compute") < 0 || !this.rows[0].key) this.choose(String(this.ranks.indexOf(stall.rank)));
    this.look(from - 0.4 * (to - from), to + 0.4 * (to - from));
    this.say([`${this.worst + 1} of ${this.stalls.length}: ${this.saysStall(stall.rank, stall).join("; ")}.`]);
  }

  // What is seen first: the place of the verdict's first sentence that has one, else the longest wait, with
  // enough of the step around it to tell where it is.
  begin() {
    const said = document.querySelector(".verdict a.place[data-from]");
    if (said) return this.showWindow(...placeOf(said), SEEN_FIRST * this.total);
    const [stall] = this.stalls;
    if (!stall) return undefined;
    const from = Math.min(stall.needed, stall.start), to = Math.max(stall.until, stall.end);
    this.showWindow(stall.rank.rank, from, to, SEEN_FIRST * this.total, stall.rank);
    return this.say([`The longest wait: ${this.saysStall(stall.rank, stall).join("; ")}.`]);
  }

  // The window that a sentence of the page is about, and at least so much of the step.
  showWindow(rank, from, to, least = 0, whose = undefined) {
    const index = this.ranks.findIndex(one => one === (whose ?? one) && one.rank === rank);
    if (index < 0) return;
    this.mark = { rank: this.ranks[index], from, to };
    if (!this.rows[0].key || !this.rows.some(row => row.rank === this.mark.rank)) this.choose(String(index));
    const around = Math.max(0.6 * (to - from), (least - (to - from)) / 2);
    this.look(from - around, to + around);
    this.say([`Framed: ${this.title(this.mark.rank)}, ${milliseconds(to - from)} from ${milliseconds(from)}.`]);
  }

  say(lines) {
    this.status.replaceChildren(...lines.map(line => Object.assign(document.createElement("span"), { textContent: line })));
  }

  controls() {
    const bar = this.box.querySelector(".toolbar");
    const button = (text, title, act) => {
      const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, title });
      made.setAttribute("aria-label", title);
      made.addEventListener("click", act);
      bar.append(made);
      return made;
    };
    if (this.stalls.length) {
      const worst = button("Show the worst", "Show the worst: the longest wait, then the next", () => this.showWorst());
      worst.className = "worst";
    }
    button("+", "Zoom in", () => this.zoom(0.5));
    button("−", "Zoom out", () => this.zoom(2));
    button("←", "Earlier", () => this.pan(-0.4));
    button("→", "Later", () => this.pan(0.4));
    button("All", "All: the whole step", () => this.look(this.first, this.total));
    this.select = document.createElement("select");
    this.select.setAttribute("aria-label", "Ranks shown");
    const some = this.detail.first.length ? "late and waiting ranks" : "ranks that wait longest";
    const options = [["most", this.ranks.length > this.most() * this.sides.length ? some : "lanes of each rank"]];
    options.push(["all", "all ranks, a line each"]);
    this.ranks.forEach((rank, i) => options.push([String(i), this.title(rank)]));
    this.select.append(...options.map(([value, text]) => new Option(text, value)));
    this.select.addEventListener("change", () => this.choose(this.select.value));
    bar.append(this.select, this.legend());
  }

  legend() {
    const key = Object.assign(document.createElement("span"), { className: "legend" });
    const present = new Set(this.ranks.flatMap(rank => rank.lanes.map(lane => lane.key)));
    const entry = (label, set) => {
      const swatch = document.createElement("i");
      set(swatch);
      const one = document.createElement("span");
      one.append(swatch, label);
      key.append(one);
    };
    for (const lane of this.lanes.values()) {
      if (present.has(lane.key) && lane.key !== "host") {
        entry(lane.label, swatch => { swatch.style.background = lane.colour; });
      }
    }
    if (this.stalls.length) entry("idle, waiting", swatch => { swatch.className = "hatched"; });
    return key;
  }

  listen() {
    const tip = this.box.querySelector(".tip");
    this.place.on("plotly_hover", ({ points: [point], event }) => {
      const row = this.rows[point.y];
      const tolerance = 3 * (this.view[1] - this.view[0]) / Math.max(200, widthOf(this.place) - 160);
      const lines = row && this.at(row, point.x * MS, tolerance);
      tip.hidden = !lines;
      if (!lines) return;
      tip.replaceChildren(...lines.map(line => Object.assign(document.createElement("div"), { textContent: line })));
      const box = this.box.getBoundingClientRect();
      const left = Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 4);
      tip.style.left = `${Math.max(0, left)}px`;
      tip.style.top = `${event.clientY - box.top + 18}px`;
    });
    this.place.on("plotly_unhover", () => { tip.hidden = true; });
    this.place.on("plotly_relayout", change => {
      const low = change["xaxis.range[0]"], high = change["xaxis.range[1]"];
      if (low !== undefined && high !== undefined) this.look(low * MS, high * MS);
      else if (change["xaxis.autorange"]) this.look(this.first, this.total);
    });
    this.place.addEventListener("wheel", event => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const area = this.place.querySelector(".nsewdrag").getBoundingClientRect();
      const [low, high] = this.view;
      const around = low + (high - low) * Math.max(0, Math.min(1, (event.clientX - area.left) / area.width));
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, around);
    }, { passive: false });
    inTheDark.addEventListener("change", () => this.draw());
    addEventListener("beforeprint", () => { this.drawn = this.paint(); });
    addEventListener("afterprint", () => {
      this.draw();
      this.drawn = this.drawn.then(() => Plotly.Plots.resize(this.place));
    });
    let waiting = 0;
    new ResizeObserver(() => {
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(() => {
        if (this.width !== undefined && this.width !== this.place.clientWidth) this.draw();
        this.width = this.place.clientWidth;
      });
    }).observe(this.place);
  }
}

const placeOf = ({ dataset: { rank, from, to } }) => [Number(rank), Number(from), Number(to)];
const timelines = new Map();
for (const box of document.querySelectorAll("[data-timeline]")) {
  const { timeline: name } = box.dataset;
  timelines.set(name, new Timeline(box, figures[name], details[name]));
}
addEventListener("click", event => {
  const link = event.target.closest("a.place[data-from]");
  if (!link) return;
  timelines.values().next().value?.showWindow(...placeOf(link));
});
