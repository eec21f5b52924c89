/* The gallery: a card a cluster with its surest and its least sure images, filters, and the search for a name. */

const THUMBNAIL = 44;
const FOUND_AT_ONCE = 60;
const filters = { cluster: -1, right: "", text: "" };
let everyLine = null; // "cluster confidence name" of all images, once it is unpacked

/** A thumbnail as a button; its frame and its mark say whether it is right. */
function pictureButton(number) {
  const button = make("button", { type: "button", class: "shot", "data-number": number, "aria-label": inWords(number), title: IMAGES.name[number] });
  if (CLASSES) button.classList.add(IMAGES.right[number] ? "right" : "wrong");
  if (hasPicture(number)) button.append(picture(number, THUMBNAIL));
  else button.append(make("span", { class: "no-pic", text: IMAGES.name[number] }));
  return button;
}

/** A row of thumbnails: one stop of the Tab key, the arrow keys go along it. */
function row(title, numbers) {
  const label = `${title} certain`;
  const list = make("div", { class: "shots", role: "group", "aria-label": label }, ...numbers.map(pictureButton));
  [...list.children].forEach((button, i) => (button.tabIndex = i ? -1 : 0));
  return make("div", { class: "row" }, make("h4", { text: label }), list);
}

function card(cluster, position) {
  const about = [count(cluster.size, "image", "images"), share(cluster.size / DATA.map.n_images)];
  if (cluster.size) about.push(`confidence ${cluster.confidence.toFixed(2)}`);
  const head = make(
    "header", {},
    make("h3", {}, dot(position), clusterTitle(position)),
    make("p", { class: "small", text: about.join(" · ") }),
  );
  if (CLASSES && cluster.size) {
    const other = cluster.stands_for !== cluster.class;
    const stands = cluster.stands_for < 0 ? "; stands for no class" : other ? `; stands for class ${CLASSES[cluster.stands_for]}` : "";
    head.append(make("p", { class: "small", text: `mostly class ${CLASSES[cluster.class]} (${share(cluster.purity)})${stands}` }));
  }
  const node = make("article", { class: "card", "data-cluster": position, "aria-label": clusterTitle(position) }, head);
  if (!cluster.size) node.append(make("p", { class: "small", text: "No image is in this cluster." }));
  if (cluster.most.length) node.append(row("Most", cluster.most));
  if (cluster.least.length) node.append(row("Least", cluster.least));
  return node;
}

const CARDS = CLUSTERS.map(card);
byId("cards").append(...CARDS);

// ---- filters --------------------------------------------------------------------------------------

byId("pick-cluster").append(
  make("option", { value: -1, text: `all ${whole.format(CLUSTERS.length)}` }),
  ...CLUSTERS.map((cluster, position) => make("option", { value: position, text: `${cluster.title} (${whole.format(cluster.size)})` })),
);

function showGallery() {
  const searching = filters.text !== "";
  byId("found").hidden = !searching;
  byId("cards").hidden = searching;
  if (searching) return showFound();
  let cards = 0;
  let shots = 0;
  for (const [position, node] of CARDS.entries()) {
    let left = 0;
    for (const list of node.querySelectorAll(".shots")) {
      let first = true;
      for (const shot of list.children) {
        shot.hidden = filters.right !== "" && String(IMAGES.right[shot.dataset.number]) !== filters.right;
        shot.tabIndex = !shot.hidden && first ? 0 : -1;
        if (!shot.hidden) [first, left] = [false, left + 1];
      }
      list.parentElement.hidden = first;
    }
    node.hidden = (filters.cluster >= 0 && filters.cluster !== position) || (filters.right !== "" && !left);
    if (!node.hidden) [cards, shots] = [cards + 1, shots + left];
  }
  const kind = filters.right === "" ? "" : filters.right === "1" ? "right " : "wrong ";
  byId("gallery-status").textContent = `${count(cards, "cluster", "clusters")}, ${count(shots, `${kind}image`, `${kind}images`)} shown of ${whole.format(DATA.map.n_images)}.`;
}

// ---- search ---------------------------------------------------------------------------------------

const numberOfRow = new Map(IMAGES.row.map((row, number) => [row, number]));

/** All images whose name holds the words, as {name, cluster, confidence, number}; -1 where it is not shown. */
function search() {
  const wanted = filters.text.toLowerCase();
  const fits = (name, cluster, number) =>
    name.toLowerCase().includes(wanted) &&
    (filters.cluster < 0 || filters.cluster === cluster) &&
    (filters.right === "" || (number >= 0 && String(IMAGES.right[number]) === filters.right));
  const found = [];
  if (everyLine) {
    for (const [row, line] of everyLine.entries()) {
      const first = line.indexOf(" ");
      const second = line.indexOf(" ", first + 1);
      const name = line.slice(second + 1);
      const number = numberOfRow.get(row) ?? -1;
      const cluster = Number(line.slice(0, first));
      if (fits(name, cluster, number)) found.push({ name, cluster, confidence: Number(line.slice(first + 1, second)), number });
    }
  } else {
    for (const [number, name] of IMAGES.name.entries()) {
      const cluster = IMAGES.cluster[number];
      if (fits(name, cluster, number)) found.push({ name, cluster, confidence: IMAGES.confidence[number], number });
    }
  }
  return found;
}

function showFound() {
  const found = search();
  const list = make("ul", { class: "results" });
  for (const { name, cluster, confidence, number } of found.slice(0, FOUND_AT_ONCE)) {
    const words = [
      picture(number, 36),
      make("span", { class: "name", text: name }),
      make("span", { class: "small" }, dot(cluster), `${clusterTitle(cluster)}, confidence ${confidence.toFixed(2)}`),
    ];
    list.append(make("li", {}, number >= 0 ? make("button", { type: "button", "data-number": number }, ...words) : make("div", {}, ...words)));
  }
  byId("found").replaceChildren(list);
  const among = everyLine ? `all ${whole.format(everyLine.length)} names` : `the ${whole.format(IMAGES.name.length)} names on this page; all are in assignments.csv`;
  const more = found.length > FOUND_AT_ONCE ? ` The first ${FOUND_AT_ONCE} are shown.` : "";
  const shownOnly = filters.right !== "" && everyLine ? " Right and wrong are known here of the images shown on this page." : "";
  byId("gallery-status").textContent = `${count(found.length, "image", "images")} found among ${among}.${more}${shownOnly}`;
}

async function unpackNames() {
  if (!byId("all-names") || !("DecompressionStream" in window)) return;
  const stream = new Blob([bytesOf("all-names")]).stream().pipeThrough(new DecompressionStream("deflate"));
  everyLine = (await new Response(stream).text()).split("\n");
  if (filters.text) showGallery();
}

byId("gallery-tools").addEventListener("submit", (event) => event.preventDefault());
byId("gallery-tools").addEventListener("input", () => {
  filters.cluster = Number(byId("pick-cluster").value);
  filters.right = byId("pick-right")?.value ?? "";
  filters.text = byId("search").value.trim();
  showGallery();
});

// ---- keys and clicks ------------------------------------------------------------------------------

byId("clusters").addEventListener("click", (event) => {
  const button = event.target.closest("button[data-number]");
  if (button) openDetail(Number(button.dataset.number));
});

byId("cards").addEventListener("keydown", (event) => {
  const shot = event.target.closest(".shot");
  if (!shot) return;
  const shots = [...shot.parentElement.children].filter((other) => !other.hidden);
  const here = shots.indexOf(shot);
  const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: shots.length - 1 }[event.key];
  if (to === undefined || !shots[to]) return;
  event.preventDefault();
  shot.tabIndex = -1;
  shots[to].tabIndex = 0;
  shots[to].focus();
});

showGallery();
unpackNames();
