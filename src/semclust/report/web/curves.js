/* The curves of training: one chart for each kind of figure, with the values of an epoch on hover and by arrow key. */

const SVG = "http://www.w3.org/2000/svg";
// As wide as there is room for: on a phone the letters stay as large as they are.
const CHART = { width: Math.max(260, Math.min(520, byId("charts").clientWidth - 34)), height: 240, left: 46, right: 12, top: 18, bottom: 26 };
const DASHES = ["", "6 4", "2 3", "9 3 2 3"]; // lines are told apart without their colours too

function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

/** Round values from low to high, at most so many steps. */
function ticks(low, high, steps) {
  const rough = (high - low) / steps || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(10)));
  return found;
}

const figure = (x) => (x === 0 || Math.abs(x) >= 0.001 ? String(Number(x.toPrecision(3))) : x.toExponential(1));

const precise = (x) => (x === 0 || Math.abs(x) >= 0.001 ? x.toFixed(3) : x.toExponential(1));

function chart({ title, span, lines, epochs }) {
  const { width, height, left, right, top, bottom } = CHART;
  const values = lines.flatMap((line) => line.values).filter((value) => value != null);
  let [low, high] = span ?? [Math.min(0, ...values), Math.max(...values)];
  if (low === high) high = low + 1;
  const [first, last] = [epochs[0], epochs[epochs.length - 1]];
  const x = (epoch) => left + (last === first ? 0.5 : (epoch - first) / (last - first)) * (width - left - right);
  const y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);

  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0" });
  for (const value of ticks(low, high, 4)) {
    node.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    node.append(svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, figure(value)));
  }
  for (const epoch of ticks(first, last, 6).filter((epoch) => Number.isInteger(epoch))) {
    node.append(svg("text", { x: x(epoch), y: height - bottom + 18, "text-anchor": "middle" }, String(epoch)));
  }
  node.append(svg("text", { x: left - 8, y: height - bottom + 18, "text-anchor": "end" }, "epoch"));
  for (const [i, { epoch }] of DATA.phases.entries()) {
    const at = x(epoch + 0.5);
    node.append(svg("line", { class: "phase", x1: at, x2: at, y1: top, y2: height - bottom }));
    node.append(svg("text", { x: at, y: top - 5, "text-anchor": "middle", class: "phase" }, String(i + 1)));
  }
  for (const [i, line] of lines.entries()) {
    let path = "";
    let drawing = false;
    for (const [at, value] of line.values.entries()) {
      if (value != null) path += `${drawing ? "L" : "M"}${x(epochs[at]).toFixed(1)} ${y(value).toFixed(1)}`;
      drawing = value != null;
    }
    node.append(svg("path", { class: "line", d: path, stroke: colour(i), "stroke-dasharray": DASHES[i] }));
    // A value without neighbours would be an invisible line.
    for (const [at, value] of line.values.entries()) {
      if (value == null || line.values[at - 1] != null || line.values[at + 1] != null) continue;
      node.append(svg("circle", { cx: x(epochs[at]), cy: y(value), r: 3, fill: colour(i) }));
    }
  }
  const cursor = svg("line", { class: "cursor", x1: 0, x2: 0, y1: top, y2: height - bottom, visibility: "hidden" });
  node.append(cursor);

  const outputs = lines.map(() => make("output", { text: "" }));
  const when = make("span", { class: "when" });
  const key = make("p", { class: "key" });
  for (const [i, line] of lines.entries()) {
    const swatch = svg("svg", { viewBox: "0 0 26 8", class: "swatch", "aria-hidden": "true" });
    swatch.append(svg("line", { x1: 1, x2: 25, y1: 4, y2: 4, stroke: colour(i), "stroke-dasharray": DASHES[i], "stroke-width": 2 }));
    key.append(make("span", {}, swatch, line.title, " ", outputs[i]));
  }
  key.append(when);

  let chosen = epochs.length - 1;
  let words = "";
  function choose(at, pointed) {
    chosen = Math.max(0, Math.min(epochs.length - 1, at));
    when.textContent = `epoch ${epochs[chosen]}`;
    for (const [i, line] of lines.entries()) outputs[i].textContent = line.values[chosen] == null ? "–" : precise(line.values[chosen]);
    cursor.setAttribute("x1", x(epochs[chosen]));
    cursor.setAttribute("x2", x(epochs[chosen]));
    cursor.setAttribute("visibility", pointed ? "visible" : "hidden");
    words = `${when.textContent}: ${lines.map((line, i) => `${line.title} ${outputs[i].textContent}`).join(", ")}`;
    node.setAttribute("aria-label", `${title}. ${words}. The arrow keys go through the epochs.`);
  }
  node.addEventListener("pointermove", (event) => {
    const box = node.getBoundingClientRect();
    const across = ((event.clientX - box.left) / box.width) * width;
    choose(Math.round(((across - left) / (width - left - right)) * (epochs.length - 1)), true);
  });
  node.addEventListener("pointerleave", () => choose(epochs.length - 1, false));
  node.addEventListener("focus", () => choose(chosen, true));
  node.addEventListener("blur", () => choose(epochs.length - 1, false));
  node.addEventListener("keydown", (event) => {
    const to = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: epochs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(to, true);
    byId("charts-live").textContent = words;
  });
  choose(epochs.length - 1, false);
  return make("figure", { class: "chart" }, make("h3", { text: title }), key, node);
}

byId("charts").append(...DATA.curves.map(chart));
