/* The map: thousands of images as points on a canvas, thumbnails where there is room, and one image named at a time. */

const CANVAS = byId("canvas");
const { points: POINTS, views: VIEWS } = DATA.map;
const MOST_ZOOM = 60;
const TILE = 34; // pixels of a thumbnail on the map; they appear where there is room for them
const MARGIN = 28;
const map = { view: VIEWS[0], by: "cluster", zoom: 1, x: 0.5, y: 0.5, point: -1, only: -1, width: 1, height: 1 };

// ---- what is shown --------------------------------------------------------------------------------

/** The number of the group that gives a point its colour, and how groups are called. */
const groupOf = (point) => {
  if (map.by === "class") return IMAGES.class[POINTS[point]];
  return map.view.clusters ? map.view.clusters[point] : IMAGES.cluster[POINTS[point]];
};
const groupTitle = (group) => (map.by === "class" ? CLASSES[group] : map.view.clusters ? String(group) : CLUSTERS[group].title);

const scale = () => (Math.min(map.width, map.height) - 2 * MARGIN) * map.zoom;
const toScreen = (point) => {
  const [x, y] = map.view.xy[point];
  return [(x - map.x) * scale() + map.width / 2, (y - map.y) * scale() + map.height / 2];
};

const themeColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let drawing = 0;
function redraw() {
  if (!drawing) drawing = requestAnimationFrame(draw);
}

function draw() {
  drawing = 0;
  const ratio = window.devicePixelRatio || 1;
  const pen = CANVAS.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, map.width, map.height);
  const inSight = [];
  for (let point = 0; point < POINTS.length; point++) {
    const [x, y] = toScreen(point);
    if (x > -40 && y > -40 && x < map.width + 40 && y < map.height + 40) inSight.push([point, x, y]);
  }
  // What is highlighted lies on top.
  if (map.only >= 0) inSight.sort((a, b) => (groupOf(a[0]) === map.only) - (groupOf(b[0]) === map.only));
  const withTile = tilesWithRoom();
  const radius = Math.min(5, (POINTS.length > 3000 ? 2.2 : 2.8) * Math.sqrt(map.zoom));
  const strength = (point) => (map.only < 0 ? 0.85 : groupOf(point) === map.only ? 1 : 0.12);
  for (const [point, x, y] of inSight) {
    pen.globalAlpha = strength(point);
    pen.fillStyle = colour(groupOf(point));
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.fill();
  }
  pen.globalAlpha = 1;
  for (const [point, x, y] of inSight) {
    if (withTile.has(point)) drawTile(pen, point, x, y);
  }
  drawTitles(pen);
  if (map.point >= 0) {
    const [x, y] = toScreen(map.point);
    pen.strokeStyle = themeColour("--ink");
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(x, y, withTile.has(map.point) ? 0.8 * TILE : radius + 4, 0, 2 * Math.PI);
    pen.stroke();
  }
  showTip();
  CANVAS.dataset.zoom = map.zoom.toFixed(2);
  CANVAS.dataset.inSight = inSight.length;
  CANVAS.dataset.tiles = withTile.size;
  if (!performance.getEntriesByName("map-drawn").length) performance.mark("map-drawn");
}

/** The points whose thumbnails fit beside each other at this zoom; moving the map does not change them. */
let roomFor = { key: "", points: new Set() };
function tilesWithRoom() {
  const key = [map.view.kind, map.by, map.only, scale()].join();
  if (roomFor.key === key) return roomFor.points;
  const points = new Set();
  const taken = new Map(); // squares of the size of a tile, and the place of the tile in each
  const apart = TILE + 3;
  for (let point = 0; point < POINTS.length && SHEETS != null && map.zoom > 1.5; point++) {
    if (map.only >= 0 && groupOf(point) !== map.only) continue;
    const [x, y] = map.view.xy[point].map((value) => value * scale());
    const [column, line] = [Math.floor(x / apart), Math.floor(y / apart)];
    let free = true;
    for (let dx = -1; dx <= 1 && free; dx++) {
      for (let dy = -1; dy <= 1 && free; dy++) {
        const other = taken.get(`${column + dx},${line + dy}`);
        free = !other || Math.abs(other[0] - x) >= apart || Math.abs(other[1] - y) >= apart;
      }
    }
    if (!free) continue;
    taken.set(`${column},${line}`, [x, y]);
    points.add(point);
  }
  roomFor = { key, points };
  return points;
}

const sheetImages = new Map();
function drawTile(pen, point, x, y) {
  const { sheet, x: left, y: top } = tileOf(POINTS[point]);
  if (!sheetImages.has(sheet)) {
    const image = new Image();
    image.addEventListener("load", redraw);
    image.src = sheetUrl(sheet);
    sheetImages.set(sheet, image);
  }
  const image = sheetImages.get(sheet);
  if (!image.complete || !image.naturalWidth) return;
  const [w, h] = SHEETS.tile;
  const size = TILE / Math.max(w, h);
  const box = [x - (w * size) / 2, y - (h * size) / 2, w * size, h * size];
  pen.drawImage(image, left, top, w, h, ...box);
  pen.strokeStyle = colour(groupOf(point));
  pen.lineWidth = 2;
  pen.strokeRect(...box);
}

let titles = []; // of the groups, each in the middle of its points
function placeTitles() {
  const members = new Map();
  for (let point = 0; point < POINTS.length; point++) {
    const group = groupOf(point);
    if (!members.has(group)) members.set(group, []);
    members.get(group).push(map.view.xy[point]);
  }
  const middle = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)];
  titles = [...members].map(([group, places]) => ({
    group,
    n: places.length,
    x: middle(places.map((place) => place[0])),
    y: middle(places.map((place) => place[1])),
  }));
  titles.sort((a, b) => b.n - a.n);
}

function drawTitles(pen) {
  if (map.view.kind === "untrained" && titles.length > 1) return; // its groups are spread all over
  pen.font = `600 13px ${getComputedStyle(document.body).fontFamily}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.lineJoin = "round";
  pen.lineWidth = 4;
  pen.strokeStyle = themeColour("--surface");
  pen.fillStyle = themeColour("--ink");
  for (const { group, x, y } of titles.slice(0, 40)) {
    if (map.only >= 0 && map.only !== group) continue;
    const title = groupTitle(group);
    const words = title.length > 24 ? `${title.slice(0, 23)}…` : title;
    const at = [(x - map.x) * scale() + map.width / 2, (y - map.y) * scale() + map.height / 2];
    pen.strokeText(words, ...at);
    pen.fillText(words, ...at);
  }
}

// ---- one image ------------------------------------------------------------------------------------

function showTip() {
  const tip = byId("tip");
  tip.hidden = map.point < 0;
  if (map.point < 0) return;
  if (tip.dataset.point !== String(map.point)) {
    const number = POINTS[map.point];
    const list = make("dl");
    const lines = facts(number);
    if (map.view.clusters) lines.splice(1, 0, [map.view.title, String(map.view.clusters[map.point])]);
    for (const [term, value] of lines) list.append(make("dt", { text: term }), make("dd", { text: value }));
    tip.replaceChildren(...(hasPicture(number) ? [picture(number, 84)] : []), make("div", {}, make("p", { class: "name", text: IMAGES.name[number] }), list));
    tip.dataset.point = map.point;
  }
  const [x, y] = toScreen(map.point);
  const beside = x + 16 + tip.offsetWidth < map.width ? x + 16 : x - 16 - tip.offsetWidth;
  tip.style.left = `${Math.max(6, Math.min(beside, map.width - tip.offsetWidth - 6))}px`;
  tip.style.top = `${Math.max(6, Math.min(y - tip.offsetHeight / 2, map.height - tip.offsetHeight - 6))}px`;
}

function nearest(x, y, within) {
  let found = -1;
  let best = within * within;
  for (let point = 0; point < POINTS.length; point++) {
    if (map.only >= 0 && groupOf(point) !== map.only) continue;
    const [px, py] = toScreen(point);
    const distance = (px - x) ** 2 + (py - y) ** 2;
    if (distance < best) [found, best] = [point, distance];
  }
  return found;
}

/** The next point in a direction: near, and rather ahead than aside. */
function nextPoint(dx, dy) {
  if (map.point < 0) return nearest(map.width / 2, map.height / 2, Infinity);
  const [x, y] = toScreen(map.point);
  let found = -1;
  let best = Infinity;
  for (let point = 0; point < POINTS.length; point++) {
    if (map.only >= 0 && groupOf(point) !== map.only) continue;
    const [px, py] = toScreen(point);
    const ahead = (px - x) * dx + (py - y) * dy;
    const aside = Math.abs((px - x) * dy - (py - y) * dx);
    if (ahead > 0.5 && ahead + 3 * aside < best) [found, best] = [point, ahead + 3 * aside];
  }
  return found;
}

function choosePoint(point) {
  if (point < 0) return;
  map.point = point;
  const [x, y] = toScreen(point);
  if (x < 20 || y < 20 || x > map.width - 20 || y > map.height - 20) [map.x, map.y] = map.view.xy[point];
  byId("map-live").textContent = inWords(POINTS[point]);
  redraw();
}

/** From elsewhere on the page. */
function goToPoint(point) {
  if (map.only >= 0 && groupOf(point) !== map.only) highlight(-1);
  if (map.zoom < 4) map.zoom = 4;
  [map.x, map.y] = map.view.xy[point];
  choosePoint(point);
  byId("map").scrollIntoView();
  CANVAS.focus({ preventScroll: true });
}

// ---- zoom and move --------------------------------------------------------------------------------

/** Zoom by a factor; what lies at (x, y) on the screen stays there. */
function zoomBy(factor, x = map.width / 2, y = map.height / 2) {
  const before = scale();
  map.zoom = Math.max(1, Math.min(MOST_ZOOM, map.zoom * factor));
  map.x += (x - map.width / 2) * (1 / before - 1 / scale());
  map.y += (y - map.height / 2) * (1 / before - 1 / scale());
  keepInside();
  redraw();
}

function moveBy(dx, dy) {
  map.x -= dx / scale();
  map.y -= dy / scale();
  keepInside();
  redraw();
}

/** The whole map is centred, and no zoom loses it. */
function keepInside() {
  const slack = 0.5 * (1 - 1 / map.zoom) + (map.zoom > 1 ? 0.1 : 0);
  map.x = Math.max(0.5 - slack, Math.min(0.5 + slack, map.x));
  map.y = Math.max(0.5 - slack, Math.min(0.5 + slack, map.y));
}

function showAll() {
  Object.assign(map, { zoom: 1, x: 0.5, y: 0.5 });
  redraw();
}

byId("zoom-in").addEventListener("click", () => zoomBy(1.5));
byId("zoom-out").addEventListener("click", () => zoomBy(1 / 1.5));
byId("zoom-all").addEventListener("click", showAll);

CANVAS.addEventListener(
  "wheel",
  (event) => {
    if (event.deltaY > 0 && map.zoom === 1) return; // nothing left to show: the page scrolls on
    event.preventDefault();
    zoomBy(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.offsetX, event.offsetY);
  },
  { passive: false },
);

const fingers = new Map(); // pointers that are down, and where
CANVAS.addEventListener("pointerdown", (event) => {
  fingers.set(event.pointerId, [event.offsetX, event.offsetY]);
  CANVAS.setPointerCapture(event.pointerId);
});
CANVAS.addEventListener("pointermove", (event) => {
  const here = [event.offsetX, event.offsetY];
  const before = fingers.get(event.pointerId);
  if (!before) {
    const point = nearest(...here, 14);
    if (point !== map.point) [map.point] = [point, redraw()];
    return;
  }
  const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
  if (other) {
    const [was, is] = [before, here].map(([x, y]) => Math.hypot(x - other[0], y - other[1]));
    zoomBy(is / Math.max(1, was), ...other);
  } else if (event.pointerType !== "touch") {
    moveBy(here[0] - before[0], here[1] - before[1]);
    CANVAS.classList.add("moving");
  }
  fingers.set(event.pointerId, here);
});
for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
  CANVAS.addEventListener(end, (event) => {
    if (end === "pointerup" && event.pointerType === "touch" && fingers.size === 1) {
      map.point = nearest(event.offsetX, event.offsetY, 28);
      redraw();
    }
    if (end === "pointerleave" && event.pointerType === "mouse" && document.activeElement !== CANVAS) {
      map.point = -1;
      redraw();
    }
    fingers.delete(event.pointerId);
    CANVAS.classList.remove("moving");
  });
}
CANVAS.addEventListener("dblclick", () => map.point >= 0 && openDetail(POINTS[map.point]));

CANVAS.addEventListener("keydown", (event) => {
  const arrow = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (arrow && event.shiftKey) moveBy(-60 * arrow[0], -60 * arrow[1]);
  else if (arrow) choosePoint(nextPoint(...arrow));
  else if (event.key === "+" || event.key === "=") zoomBy(1.5, ...(map.point >= 0 ? toScreen(map.point) : []));
  else if (event.key === "-") zoomBy(1 / 1.5);
  else if (event.key === "0") showAll();
  else if (event.key === "Enter" && map.point >= 0) openDetail(POINTS[map.point]);
  else if (event.key === "Escape") [map.point] = [-1, redraw()];
  else return;
  event.preventDefault();
});
CANVAS.addEventListener("blur", () => {
  map.point = -1;
  redraw();
});

// ---- what to see, and the legend ------------------------------------------------------------------

function choice(legend, name, options, chosen, onPick) {
  const set = make("fieldset", { class: "choice" }, make("legend", { text: legend }));
  for (const [value, title] of options) {
    const input = make("input", { type: "radio", name, value, checked: value === chosen });
    input.addEventListener("change", () => onPick(value));
    set.append(make("label", {}, input, make("span", { text: title })));
  }
  return set;
}

function highlight(group) {
  map.only = map.only === group ? -1 : group;
  for (const button of byId("legend").querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.group) === map.only));
  }
  map.point = -1;
  redraw();
}

function showView() {
  placeTitles();
  map.only = -1;
  map.point = -1;
  byId("tip").dataset.point = "";
  const all = POINTS.length === DATA.map.n_images;
  const which = all ? `All ${whole.format(POINTS.length)} images` : `A random sample of ${whole.format(POINTS.length)} of the ${whole.format(DATA.map.n_images)} images`;
  byId("map-about").textContent = `${which}, placed by t-SNE so that what looks alike to the network lies together. ${map.view.caption}`;
  CANVAS.setAttribute("aria-label", `Map of the images: ${map.view.title}, coloured by ${map.by}`);
  const listed = map.by === "class" ? [...titles].sort((a, b) => a.group - b.group) : titles;
  byId("legend").replaceChildren(
    ...listed.map(({ group, n }) =>
      make(
        "button",
        { type: "button", "aria-pressed": "false", "data-group": group, onclick: () => highlight(group) },
        dot(group),
        make("span", { class: "title", text: groupTitle(group) }),
        make("span", { class: "n", text: whole.format(n) }),
      ),
    ),
  );
  redraw();
}

byId("map-tools").append(
  choice("Features", "view", VIEWS.map((view) => [view.kind, view.title]), VIEWS[0].kind, (kind) => {
    map.view = VIEWS.find((view) => view.kind === kind);
    showView();
  }),
);
if (CLASSES) {
  byId("map-tools").append(
    choice("Colour", "colour", [["cluster", "by cluster"], ["class", "by class"]], "cluster", (by) => {
      map.by = by;
      showView();
    }),
  );
}

function fitCanvas() {
  const ratio = window.devicePixelRatio || 1;
  [map.width, map.height] = [CANVAS.clientWidth, CANVAS.clientHeight];
  [CANVAS.width, CANVAS.height] = [Math.round(map.width * ratio), Math.round(map.height * ratio)];
  redraw();
}
new ResizeObserver(fitCanvas).observe(CANVAS);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
fitCanvas();
showView();
