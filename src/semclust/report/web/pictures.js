"use strict";
/* What every part of the page uses: the data, elements, colours and thumbnails.
   Text from the data is only ever set as text, so whatever a file is called, it stays a name. */

const DATA = JSON.parse(document.getElementById("data").textContent);
const { clusters: CLUSTERS, images: IMAGES, classes: CLASSES, sheets: SHEETS } = DATA;

function byId(id) {
  return document.getElementById(id);
}

/** An element with attributes; "text" is its text, "on..." a listener. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

// ---- words ----------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const count = (n, one, many) => `${whole.format(n)} ${n === 1 ? one : many}`;
const share = (x) => `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)} %`;
const clusterTitle = (position) => `Cluster ${CLUSTERS[position].title}`;

/** What is known of an image, as [term, value]. */
function facts(number) {
  const list = [
    ["Cluster", CLUSTERS[IMAGES.cluster[number]].title],
    ["Confidence", IMAGES.confidence[number].toFixed(3)],
    ["Second choice", CLUSTERS[IMAGES.runner_up[number]].title],
  ];
  if (CLASSES) list.push(["Class", `${CLASSES[IMAGES.class[number]]}, ${IMAGES.right[number] ? "right" : "wrong"}`]);
  return list;
}

const inWords = (number) =>
  [IMAGES.name[number], ...facts(number).map(([term, value]) => `${term.toLowerCase()} ${value}`)].join(", ");

// ---- colours --------------------------------------------------------------------------------------

// Ten that are told apart on a light and on a dark page; beyond, steps around the wheel that never repeat soon.
const COLOURS = ["#3b7dd8", "#e8871e", "#2f9e5f", "#d6455d", "#8a63d2", "#9a6a43", "#e070b4", "#7a8594", "#b0a41c", "#1fa9bb"];

function colour(position) {
  if (position < COLOURS.length) return COLOURS[position];
  return `hsl(${((position * 137.508) % 360).toFixed(1)} ${position % 2 ? 68 : 52}% ${[48, 60, 54][position % 3]}%)`;
}

function dot(position) {
  const node = make("span", { class: "dot", "aria-hidden": "true" });
  node.style.background = colour(position);
  return node;
}

// ---- thumbnails -----------------------------------------------------------------------------------

/** The bytes that an element of the page holds as base64. */
function bytesOf(id) {
  const letters = atob(byId(id).textContent);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

const sheetUrls = new Map();

/** The sheet as a file in memory: one for all of its thumbnails. */
function sheetUrl(sheet) {
  if (!sheetUrls.has(sheet)) {
    sheetUrls.set(sheet, URL.createObjectURL(new Blob([bytesOf(`sheet-${sheet}`)], { type: SHEETS.type })));
  }
  return sheetUrls.get(sheet);
}

const hasPicture = (number) => SHEETS != null && number >= 0 && number < SHEETS.pictures;

/** Where the thumbnail of an image lies: its sheet, and its corner there in pixels. */
function tileOf(number) {
  const inSheet = number % (SHEETS.columns * SHEETS.lines);
  return {
    sheet: Math.floor(number / (SHEETS.columns * SHEETS.lines)),
    x: (inSheet % SHEETS.columns) * SHEETS.cell[0] + SHEETS.edge,
    y: Math.floor(inSheet / SHEETS.columns) * SHEETS.cell[1] + SHEETS.edge,
  };
}

/** Show a thumbnail in ``node``, its longer side ``side`` pixels long. */
function showPicture(node, number, side) {
  const { sheet, x, y } = tileOf(number);
  const [w, h] = SHEETS.tile;
  const scale = side / Math.max(w, h);
  Object.assign(node.style, {
    width: `${w * scale}px`,
    height: `${h * scale}px`,
    backgroundImage: `url("${sheetUrl(sheet)}")`,
    backgroundSize: `${SHEETS.columns * SHEETS.cell[0] * scale}px auto`,
    backgroundPosition: `${-x * scale}px ${-y * scale}px`,
  });
}

/** A thumbnail, or where there is none, an empty place for one. It is decoration: its words stand beside it. */
function picture(number, side) {
  const node = make("span", { class: "pic", "aria-hidden": "true" });
  if (hasPicture(number)) showPicture(node, number, side);
  else {
    node.classList.add("none");
    Object.assign(node.style, { width: `${side}px`, height: `${side}px` });
  }
  return node;
}

// ---- one image at a time --------------------------------------------------------------------------

function openDetail(number) {
  const dialog = byId("detail");
  const list = make("dl", { class: "facts" });
  for (const [term, value] of facts(number)) {
    list.append(make("div", {}, make("dt", { text: term }), make("dd", { text: value })));
  }
  const actions = make("div", { class: "actions" });
  const point = DATA.map.points.indexOf(number);
  if (point >= 0) {
    actions.append(make("button", { type: "button", text: "Show on the map", onclick: () => (dialog.close(), goToPoint(point)) }));
  }
  actions.append(make("button", { type: "button", class: "main", text: "Close", onclick: () => dialog.close() }));
  dialog.replaceChildren(
    picture(number, 192),
    make("h2", { id: "detail-name", class: "name", text: IMAGES.name[number] }),
    list,
    actions,
  );
  dialog.showModal();
}

byId("detail").addEventListener("click", (event) => {
  if (event.target === byId("detail")) byId("detail").close(); // beside it
});

// ---- copy buttons ---------------------------------------------------------------------------------

/** Where the browser keeps the clipboard from a page, the text is selected for the user to copy. */
async function copy(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", () => copy(button));

// ---- small decorations of the template's own parts ------------------------------------------------

byId("strip").classList.toggle("many", CLUSTERS.length > 100); // then gaps between them would fill it
for (const [position, { size }] of CLUSTERS.entries()) {
  if (!size) continue;
  const part = make("span", { title: `${clusterTitle(position)}: ${count(size, "image", "images")}` });
  part.style.flexGrow = size;
  part.style.background = colour(position);
  byId("strip").append(part);
}

for (const pair of document.querySelectorAll("[data-pair]")) {
  const extremes = make("span", { class: "extremes", "aria-hidden": "true" });
  for (const position of pair.dataset.pair.split(" ").map(Number)) {
    extremes.append(dot(position), ...CLUSTERS[position].most.slice(0, 3).filter(hasPicture).map((number) => picture(number, 30)));
  }
  pair.append(extremes);
}
