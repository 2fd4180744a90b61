"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const steps = (column) => {
  const [first, last] = data.steps[column];
  return first === last ? `step ${first}` : `steps ${first} to ${last}`;
};
const make = (name, text, parent) => {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (parent) parent.append(made);
  return made;
};
const format = (value) => (Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(+value.toPrecision(3)));

/* A plot of lines over steps. Each series: label, points [[step, value]], colour, dashed. */
function plot(parent, title, series, marks) {
  const known = series.filter((each) => each.points.length);
  parent.replaceChildren();
  if (!known.length) return void make("p", "Nothing to draw.", parent);
  const width = Math.max(280, parent.clientWidth), height = 260, left = 52, right = 12, top = 12, bottom = 30;
  const xs = known.flatMap((each) => each.points.map((point) => point[0]));
  const ys = known.flatMap((each) => each.points.map((point) => point[1]));
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)], [y0, y1] = [Math.min(...ys), Math.max(...ys)];
  const x = (value) => left + (x1 > x0 ? (value - x0) / (x1 - x0) : 0.5) * (width - left - right);
  const y = (value) => height - bottom - (y1 > y0 ? (value - y0) / (y1 - y0) : 0.5) * (height - top - bottom);
  const space = "http://www.w3.org/2000/svg";
  const add = (name, attributes, text) => {
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    svg.append(made);
    return made;
  };
  const svg = document.createElementNS(space, "svg");
  const ends = known.map((each) => `${each.label} ${format(each.points[0][1])} to ${format(each.points.at(-1)[1])}`).join("; ");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `${title} from step ${x0} to ${x1}: ${ends}`);
  for (let tick = 0; tick <= 4; tick++) {
    const value = y0 + ((y1 - y0) * tick) / 4;
    add("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), stroke: colour("--line") });
    add("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value));
    if (y1 === y0) break;
  }
  add("text", { x: left, y: height - 8 }, `step ${x0}`);
  for (const tick of x1 - x0 >= 4 ? [1, 2, 3] : []) {
    const step = Math.round(x0 + ((x1 - x0) * tick) / 4);
    add("line", { x1: x(step), x2: x(step), y1: height - bottom, y2: height - bottom + 5, stroke: colour("--soft") });
    add("text", { x: x(step), y: height - 8, "text-anchor": "middle" }, String(step));
  }
  if (x1 > x0) add("text", { x: width - right, y: height - 8, "text-anchor": "end" }, `step ${x1}`);
  for (const mark of marks) {
    if (mark.step < x0 || mark.step > x1) continue;
    const line = add("line", { x1: x(mark.step), x2: x(mark.step), y1: top, y2: height - bottom, stroke: colour("--mark"), "stroke-dasharray": "2 3", "stroke-width": 1.5 });
    const text = document.createElementNS(space, "title");
    text.textContent = `step ${mark.step}, ${mark.text}`;
    line.append(text);
  }
  for (const each of known) {
    const points = each.points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    add("polyline", { points, fill: "none", stroke: colour(each.colour), "stroke-width": 2, "stroke-dasharray": each.dashed ? "6 4" : "none" });
    if (each.points.length === 1) add("circle", { cx: x(each.points[0][0]), cy: y(each.points[0][1]), r: 3, fill: colour(each.colour) });
  }
  parent.append(svg);
}

function legend(parent, series) {
  parent.replaceChildren();
  for (const each of series) {
    const item = make("li", "", parent), line = make("i", "", item);
    line.style.borderTopColor = colour(each.colour);
    if (each.dashed) line.className = "dashed";
    item.append(each.label);
  }
}

/* The loss of one run, or of two. */
function drawLoss() {
  const series = data.loss.map((run, index) => ({ label: run.label, points: run.points, colour: index ? "--two" : "--one", dashed: index > 0 }));
  plot(document.getElementById("loss-plot"), "Training loss", series, data.events);
  const entries = data.events.length ? [...series, { label: "event", colour: "--mark", dashed: true }] : series;
  legend(document.getElementById("loss-legend"), entries);
}

/* Heat maps. Byte 0 is nothing; 1 to 255 go from low to high. */
const value = (grid, byte) => {
  const scaled = grid.low + ((byte - 1) / 254) * (grid.high - grid.low);
  return grid.log ? 10 ** scaled : scaled;
};
const shown = (grid, byte) => {
  if (!byte) return "nothing";
  return grid.log ? `about ${+(100 * value(grid, byte)).toPrecision(2)} % ${grid.unit}` : `about ${value(grid, byte).toFixed(1)} ${grid.unit}`;
};
const shade = (grid, byte, dark) => {
  let part = (byte - 1) / 254;
  if (grid.darkIsLow) part = Math.max(0, 1 - part * 1.8);
  const light = dark ? 22 + 60 * part : 90 - 62 * part;
  return `hsl(${grid.log ? 212 : grid.darkIsLow ? 280 : 24} ${40 + 45 * part}% ${light}%)`;
};

function heatMap(grid, parent) {
  const figure = make("figure", "", parent), caption = make("figcaption", grid.title, figure);
  make("small", grid.meaning, caption);
  const key = make("div", "", figure);
  const canvas = make("canvas", "", figure), cells = bytes(grid.cells), columns = data.steps.length, rows = grid.rows.length;
  const worst = grid.worst.length ? `worst: ${grid.worst[0][0]}` : "nothing to show";
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${grid.title}, ${rows} layers by ${columns} intervals; ${worst}`);
  const details = make("details", "", figure);
  make("summary", "Worst layers as a table", details);
  const scroll = make("div", "", details), table = make("table", "", scroll);
  scroll.className = "scroll";
  scroll.tabIndex = 0;
  for (const [name, worth] of grid.worst) {
    const row = make("tr", "", table);
    make("td", name, row);
    make("td", grid.log ? `${(100 * worth).toPrecision(3)} %` : `${worth.toFixed(2)} ${grid.unit}`, row);
  }
  key.className = "key";
  const ends = [1, 255].map((byte) => shown(grid, byte).replace("about ", ""));
  make("span", grid.log ? ends[0] : `${ends[0]} or less`, key);
  const bar = make("i", "", key);
  make("span", grid.log ? ends[1] : `${ends[1]} or more`, key);
  const none = make("span", "", key);
  make("i", "", none).className = "none";
  none.append("nothing");
  let at = null, geometry = null;
  const draw = () => {
    const width = Math.max(200, figure.clientWidth), height = Math.max(6, Math.min(16, 640 / rows)), ratio = window.devicePixelRatio || 1;
    const labels = height >= 11 ? Math.min(190, width * 0.4) : 0, cell = (width - labels) / columns;
    canvas.width = width * ratio;
    canvas.height = (rows * height + 18) * ratio;
    canvas.style.height = `${rows * height + 18}px`;
    geometry = { labels, cell, height };
    const draws = canvas.getContext("2d"), dark = matchMedia("(prefers-color-scheme: dark)").matches;
    draws.scale(ratio, ratio);
    const shades = [...Array(9).keys()].map((part) => shade(grid, 1 + (254 * part) / 8, dark));
    bar.style.background = `linear-gradient(to right, ${shades.join(", ")})`;
    draws.fillStyle = colour("--cell");
    draws.fillRect(labels, 0, width - labels, rows * height);
    draws.font = "11px system-ui, sans-serif";
    draws.textBaseline = "middle";
    for (let row = 0; row < rows; row++) {
      if (labels) {
        let name = grid.rows[row];
        while (name.length > 4 && draws.measureText(name).width > labels - 8) name = `…${name.slice(2)}`;
        draws.fillStyle = colour("--soft");
        draws.fillText(name, 0, (row + 0.5) * height);
      }
      for (let column = 0; column < columns; column++) {
        const byte = cells[row * columns + column];
        if (!byte) continue;
        draws.fillStyle = shade(grid, byte, dark);
        draws.fillRect(labels + column * cell, row * height, Math.max(cell, 1), height - (height > 5 ? 1 : 0));
      }
    }
    draws.fillStyle = colour("--soft");
    draws.fillText(`step ${data.steps[0][0]}`, labels, rows * height + 10);
    const half = Math.floor(columns / 2);
    if (half) draws.fillText(`${data.steps[half][0]}`, labels + half * cell, rows * height + 10);
    const end = `${data.steps.at(-1)[1]}`;
    draws.fillText(end, width - draws.measureText(end).width, rows * height + 10);
    if (at) {
      draws.strokeStyle = colour("--ink");
      draws.lineWidth = 2;
      draws.strokeRect(labels + at[1] * cell, at[0] * height, Math.max(cell, 3), height);
    }
  };
  const select = (row, column) => {
    at = [Math.min(rows - 1, Math.max(0, row)), Math.min(columns - 1, Math.max(0, column))];
    draw();
    const text = `${grid.title}, ${grid.rows[at[0]]}, ${steps(at[1])}: ${shown(grid, cells[at[0] * columns + at[1]])}`;
    document.getElementById("cell").textContent = text;
    canvas.title = text;
  };
  canvas.addEventListener("pointermove", (event) => {
    if (event.offsetX >= geometry.labels) select(Math.floor(event.offsetY / geometry.height), Math.floor((event.offsetX - geometry.labels) / geometry.cell));
  });
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    select((at ? at[0] : 0) + (at ? move[0] : 0), (at ? at[1] : 0) + (at ? move[1] : 0));
  });
  return draw;
}

/* A histogram of the exponents of one cast, on a logarithmic scale. */
function histogram(parent, cast) {
  const found = data.exponents, all = bytes(found.cells).subarray(cast * found.columns, (cast + 1) * found.columns);
  parent.replaceChildren();
  let [first, last] = [all.findIndex((each) => each), all.findLastIndex((each) => each)];
  if (first < 0) return void make("p", "No value was sampled.", parent);
  const range = found.range[cast], width = Math.max(280, parent.clientWidth), height = 220, left = 52, right = 12, top = 26, bottom = 30;
  if (range) [first, last] = [Math.max(0, Math.min(first, Math.floor(range[0]) - found.first - 1)), Math.min(found.columns - 1, Math.max(last, Math.ceil(range[1]) - found.first))];
  const x = (exponent) => left + ((exponent - found.first - first) / (last - first + 1)) * (width - left - right);
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const add = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    svg.append(made);
  };
  const limits = range ? `; up to 2^${range[0].toFixed(1)} they become 0, beyond 2^${range[1].toFixed(1)} they clip` : "";
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Exponents of ${found.names[cast]}: magnitudes from 2^${found.first + all.findIndex((each) => each)} to 2^${found.first + all.findLastIndex((each) => each) + 1}${limits}`);
  for (const power of [0, -2, -4, -6]) {
    const y = top + (power / found.low) * (height - top - bottom);
    add("line", { x1: left, x2: width - right, y1: y, y2: y, stroke: colour("--line") });
    add("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, power ? `10^${power}` : "1");
  }
  for (let column = first; column <= last; column++) {
    if (!all[column]) continue;
    const tall = (all[column] / 255) * (height - top - bottom), from = x(found.first + column);
    add("rect", { x: from, y: height - bottom - tall, width: Math.max(1, x(found.first + column + 1) - from - 1), height: tall, fill: colour("--one") });
  }
  for (const [index, text] of [[0, "becomes 0"], [1, "clips"]]) {
    if (!range) break;
    const at = x(range[index]);
    add("line", { x1: at, x2: at, y1: top - 6, y2: height - bottom, stroke: colour("--mark"), "stroke-width": 2, "stroke-dasharray": "4 3" });
    add("text", { x: at + (index ? 4 : -4), y: top - 10, "text-anchor": index ? (at > width - 60 ? "end" : "start") : at < 110 ? "start" : "end" }, text);
  }
  const apart = [4, 8, 16, 32].find((each) => (last - first) / each <= 6);
  for (let exponent = Math.ceil((found.first + first + 3) / apart) * apart; exponent <= found.first + last - 2; exponent += apart) {
    add("line", { x1: x(exponent), x2: x(exponent), y1: height - bottom, y2: height - bottom + 5, stroke: colour("--soft") });
    add("text", { x: x(exponent), y: height - 8, "text-anchor": "middle" }, `2^${exponent}`);
  }
  add("text", { x: left, y: height - 8 }, `2^${found.first + first}`);
  add("text", { x: width - right, y: height - 8, "text-anchor": "end" }, `2^${found.first + last + 1}`);
  parent.append(svg);
}

/* One cast, chosen from all: its amax and scale over time, and its exponents. */
function castPlots() {
  const parent = document.getElementById("lines"), lines = data.lines, names = lines.names || data.exponents.names;
  if (!names) {
    make("p", "No figures of single tensors were recorded.", parent);
    return () => {};
  }
  const label = make("label", "Tensor ", parent), choice = make("select", "", label), columns = data.steps.length;
  names.forEach((name, index) => (make("option", name, choice).value = index));
  const draws = [];
  if (lines.names) {
    make("h3", "Amax and scale", parent);
    const box = make("div", "", parent), list = make("ul", "", parent);
    const decoded = { amax: bytes(lines.amax), scale: bytes(lines.scale) };
    box.className = "plot";
    list.className = "legend";
    const series = (what, tint, dashed) => ({
      label: `${what}, log2`, colour: tint, dashed,
      points: data.steps.map(([, last], column) => [last, decoded[what][choice.value * columns + column]]).filter((point) => point[1])
        .map(([step, byte]) => [step, lines.low + ((byte - 1) / 254) * (lines.high - lines.low)]),
    });
    draws.push(() => {
      const both = [series("amax", "--one", false), series("scale", "--two", true)];
      plot(box, `Amax and scale of ${names[choice.value]}, log2,`, both, []);
      legend(list, both);
    });
  }
  if (data.exponents.names) {
    make("h3", "Exponents of its values", parent);
    make("p", data.lines.names ? "Shares of the sampled values, and the range of the last scale." : "Shares of the sampled values.", parent);
    const box = make("div", "", parent);
    box.className = "plot";
    draws.push(() => histogram(box, Number(choice.value)));
  }
  const draw = () => draws.forEach((each) => each());
  choice.addEventListener("change", draw);
  return draw;
}

const gallery = document.getElementById("heat");
const drawings = [drawLoss, ...data.grids.map((grid) => heatMap(grid, gallery)), castPlots()];
if (!data.grids.length) make("p", "The run had no FP8 casts, or no interval.", gallery);
const drawAll = () => drawings.forEach((draw) => draw());
drawAll();
let pending = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(drawAll);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
