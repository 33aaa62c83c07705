"use strict";
/* Elements, numbers and tables that every page of moewright shares. All text goes in as text. */
const mw = {render: {}, palette: {}};

mw.el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  const shown = children.flat().filter(child => child !== null && child !== undefined);
  node.append(...(mw.unbroken.has(tag) ? shown : shown.flatMap(child => child instanceof Node ? [child] : mw.breakable(child))));
  return node;
};
/* Long words may wrap behind their own punctuation, and only there; what is copied stays the same. */
mw.unbroken = new Set(["option", "textarea", "pre", "title"]);
mw.breakable = text => String(text).split(/(\S{17,})/).flatMap((part, place) => place % 2
  ? part.split(/(?<=[|+:;=/_@<>(){}&?%\]\[])(?=[^,;.:])|(?<=[,.])(?=[^\d,.])/).flatMap((piece, number) => number ? [mw.el("wbr"), document.createTextNode(piece)] : [document.createTextNode(piece)])
  : part ? [part] : []);
mw.escape = text => String(text).replace(/[&<>"']/g, letter => `&#${letter.charCodeAt(0)};`);

/* As `spec/units.py` writes them; a test compares the two. */
mw.digits = value => {
  if (!Number.isFinite(value)) return "–";
  const rounded = Number(value.toPrecision(3));
  if (Math.abs(rounded) < 1e3) return String(rounded);
  return mw.count(value);
};
/* By hand: a page's first toLocaleString reads tables of all languages, 30 ms. */
mw.count = value => String(Math.sign(value) * Math.round(Math.abs(value)) + 0).replace(/\B(?=(?:\d{3})+$)/g, ",");
mw.seconds = value => {
  const size = Math.abs(value);
  if (size >= 1 || size === 0) return `${mw.digits(value)} s`;
  if (size >= 1e-3) return `${mw.digits(value * 1e3)} ms`;
  return `${mw.digits(value * 1e6)} us`;
};
mw.bytes = value => {
  const size = Math.abs(value);
  for (const [unit, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (size >= scale) return `${mw.digits(value / scale)} ${unit}`;
  return `${mw.count(value)} B`;
};
mw.percent = (value, decimals = 1) => `${(100 * value).toFixed(decimals)}%`;
mw.words = name => name.replaceAll("_", " ");
mw.signed = (value, show) => `${value < 0 ? "−" : "+"}${show(Math.abs(value))}`;

/* A tile carries the exact value: `data-name` is its key in `estimate --json`. */
mw.tile = (label, text, note, name, value) => mw.el("div", {class: "tile"},
  mw.el("span", {}, mw.term(label)),
  mw.el("b", {"data-name": name, "data-value": value === undefined ? null : String(value), title: value === undefined ? null : String(value)}, text),
  mw.el("small", {}, (note || "").replaceAll(/(\d) (?=(?:s|ms|us|[GMK]iB|B)\b)/g, "$1\u00a0")));

/* What stands where an answer will be. */
mw.skeleton = (...heights) => heights.map(height => mw.el("div", {class: "panel skeleton", style: `height:${height}px`, "aria-hidden": "true"}));

/* Words of the glossary say what they mean and lead to it: to the studio's, or to the part of it at the end of a page that
   stands alone. `terms` has anchors and meanings. */
mw.terms = {};
mw.glossary = "/learn/glossary";
mw.noteTerm = () => {};
mw.term = (text, key = text) => {
  const entry = typeof text === "string" && (mw.terms[key.toLowerCase()] || mw.terms[text.toLowerCase()]);
  if (!entry) return text;
  mw.noteTerm(text, entry);
  return mw.el("a", {class: "term", href: `${mw.glossary}#${entry.anchor}`, title: entry.meaning}, text);
};

mw.panel = (title, ...children) => mw.el("section", {class: "panel"}, title ? mw.el("div", {class: "head"}, mw.el("h2", {}, mw.term(title))) : "", ...children);

mw.wide = node => { node.classList.add("span"); return node; };

/* What a copy has of a cell: a layout is its text, and buttons that copy are none of it. */
mw.copied = run => {
  if (!(run instanceof Element)) return run instanceof Node ? run.textContent : String(run ?? "");
  if (run.dataset.layout) return run.dataset.layout;
  return run.matches("button.copy, .labels") ? "" : [...run.childNodes].map(mw.copied).join("");
};
/* Rows as text, to be copied; `read` gives the heads and the rows when they are wanted. */
mw.asCsv = lines => lines.map(line => line.map(cell => /[",\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell).join(",")).join("\n");
mw.asMarkdown = ([heads, ...rows]) => [heads, heads.map(() => "---"), ...rows].map(line => `| ${line.map(cell => cell.replaceAll("|", "\\|")).join(" | ")} |`).join("\n");
mw.rowCopies = (read, caption) => [mw.copyButton(() => mw.asCsv(read()), `${caption} as CSV`, "CSV"), mw.copyButton(() => mw.asMarkdown(read()), `${caption} as Markdown`, "Markdown")];
mw.readTable = table => [...table.rows].map(row => [...row.cells].map(cell => mw.copied(cell).trim()));
/* A table is copied whole, shows its first rows, and turns into cards where its box is too narrow. */
mw.shownRows = {table: 12, cards: 4};
mw.table = (columns, rows, caption, totals = []) => {
  const body = mw.el("tbody", {}, rows.map((row, place) => mw.el("tr", {class: totals[place] ? "total" : null},
    columns.map((column, index) => mw.el("td", {class: column.n ? "n" : null, "data-label": column.t || null}, row[index])))));
  const head = mw.el("thead", {}, mw.el("tr", {}, columns.map(column => mw.el(column.t ? "th" : "td", {class: column.n ? "n" : null, scope: column.t ? "col" : null}, mw.term(column.t, column.key)))));
  return mw.tableBox(mw.el("table", {}, mw.el("caption", {class: "visually-hidden"}, caption), head, body));
};
mw.tableCopies = table => mw.rowCopies(() => mw.readTable(table), table.caption ? table.caption.textContent : "the table");
mw.tableBox = table => {
  const copies = mw.tableCopies(table);
  const more = mw.el("button", {type: "button", class: "small no-print", hidden: true, onclick: () => { box.classList.add("whole"); more.hidden = true; }});
  const box = mw.el("div", {class: "table-box"}, table, mw.el("div", {class: "row copies no-print"}, more, copies));
  box.fit = () => mw.fitTables([box]);
  box.parts = {table, copies, more, width: -1};
  new ResizeObserver(() => { if (box.clientWidth !== box.parts.width) box.fit(); }).observe(box);
  return box;
};
/* All boxes are read and then all are written, so that a page is laid out as often as a single table's. */
mw.fitTables = boxes => {
  for (const box of boxes) box.parts.width = box.clientWidth || -1;
  const shown = boxes.filter(box => box.parts.width > 0);
  for (const box of shown) {
    for (const copy of box.parts.copies) copy.hidden = box.parts.table.tBodies[0].children.length < 2;
    box.classList.remove("narrow");
  }
  const narrow = shown.map(box => innerWidth <= 560 || box.parts.table.scrollWidth > box.parts.width + 1);
  shown.forEach((box, place) => {
    const {table, more} = box.parts, rows = [...table.tBodies[0].children];
    box.classList.toggle("narrow", narrow[place]);
    const most = mw.shownRows[narrow[place] ? "cards" : "table"];
    more.hidden = box.classList.contains("whole") || rows.length <= most + 1;
    more.textContent = `Show all ${rows.length}`;
    rows.forEach((row, number) => row.classList.toggle("beyond", !more.hidden && number >= most && !row.classList.contains("total") && !row.classList.contains("best")));
  });
};

/* `content` is a text, or what makes it when it is wanted. */
mw.copyButton = (content, name, shown = "Copy") => mw.el("button", {type: "button", class: "small copy no-print", title: shown === "Copy" ? content : null, "aria-label": `copy ${name}`, onclick: event => {
  const text = typeof content === "string" ? content : content();
  const done = () => { event.target.textContent = "Copied"; setTimeout(() => { event.target.textContent = shown; }, 1500); };
  if (navigator.clipboard) { navigator.clipboard.writeText(text).then(done, () => prompt(name, text)); } else prompt(name, text);
}}, shown);
/* A layout in a list: in words, its text behind a button; `pick` loads it. */
mw.layoutCell = (text, words, pick) => mw.el("div", {class: "layout-cell", "data-layout": text},
  pick ? mw.el("button", {type: "button", class: "small pick", onclick: pick}, words || text) : mw.el("span", {}, words || mw.el("code", {}, text)),
  " ", mw.copyButton(text, "the layout's text"));

mw.colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

let resizing = 0, settledWidth = innerWidth;
addEventListener("resize", () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(() => { if (innerWidth !== settledWidth) mw.settle(document.getElementById("content")); }); });

/* What holds of every page is done here, once its content stands: a heading, and on a phone an end in sight.
   There, long lists show their first lines, and panels and parts of chapters that would make the page longer than
   `page` points are folded into their titles. */
mw.longest = {page: 3900, list: 4};
mw.settle = (root, name) => {
  settledWidth = innerWidth;
  if (name && !root.querySelector("h1")) root.prepend(mw.el("h1", {class: "visually-hidden"}, name));
  mw.addCopies(root);
  mw.fitTables([...root.querySelectorAll("div.table-box")]);
  root.querySelectorAll(".unfold").forEach(button => button.undo());
  if (innerWidth > 560) return;
  for (const list of root.querySelectorAll("ul.plain, ol.plain"))
    if (list.children.length > mw.longest.list + 1) mw.fold(list, "folded-list", `Show all ${list.children.length}`, button => list.after(button));
  if (document.documentElement.scrollHeight <= mw.longest.page) return;
  const panels = [...root.querySelectorAll("section.panel, section.part")].filter(panel => !panel.parentElement.closest(".panel")).map(panel => [panel, panel.querySelector(":scope > .head, :scope > h1, :scope > h2")]).filter(item => item[1]).slice(1);
  const buttons = panels.map(([panel, head]) => mw.fold(panel, "folded", "Show", button => head.append(" ", button), `show ${head.textContent}`));
  panels.forEach(([panel], place) => {
    panel.classList.remove("folded");
    if (document.documentElement.scrollHeight > mw.longest.page) panel.classList.add("folded"); else buttons[place].undo();
  });
};
mw.fold = (node, kind, text, place, name) => {
  const undo = () => { node.classList.remove(kind); button.remove(); };
  const button = mw.el("button", {type: "button", class: "small unfold no-print", "aria-label": name, "aria-expanded": "false", onclick: () => { const read = node.contains(button) ? button.parentElement : node; undo(); read.tabIndex = -1; read.focus({preventScroll: true}); node.querySelectorAll(".table-box").forEach(box => box.fit()); }}, text);
  button.undo = undo;
  node.classList.add(kind);
  place(button);
  return button;
};
/* A picture goes to the clipboard; where there is none, it is saved. `paint` gives its address, as PNG. */
mw.pngButton = (label, paint) => {
  const button = mw.el("button", {type: "button", class: "small copy no-print", "aria-label": `copy as PNG: ${label}`, onclick: async () => {
    const address = await paint();
    const bytes = Uint8Array.from(atob(address.split(",")[1]), letter => letter.charCodeAt(0));
    const blob = new Blob([bytes], {type: "image/png"});
    try {
      await navigator.clipboard.write([new ClipboardItem({"image/png": blob})]);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "PNG"; }, 1500);
    } catch { mw.save(`${label.split(/[;,:]/)[0]}.png`, blob); }
  }}, "PNG");
  return button;
};
mw.onCard = (width, height, source) => {
  const canvas = mw.el("canvas", {width: Math.ceil(width), height: Math.ceil(height)}), pen = canvas.getContext("2d");
  pen.fillStyle = mw.colour("card");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(source, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
};
/* A drawing alone has no style sheet: what that gives each shape goes with it. */
mw.drawnStyles = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "paint-order", "opacity", "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline", "display", "visibility"];
mw.standAlone = drawing => {
  const copy = drawing.cloneNode(true), box = drawing.getBoundingClientRect();
  const shapes = [copy, ...copy.querySelectorAll("*")];
  [drawing, ...drawing.querySelectorAll("*")].forEach((shape, place) => {
    const style = getComputedStyle(shape);
    shapes[place].style.cssText = mw.drawnStyles.map(name => `${name}:${style.getPropertyValue(name)}`).join(";");
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", box.width);
  copy.setAttribute("height", box.height);
  return new XMLSerializer().serializeToString(copy);
};
mw.paintDrawing = async drawing => {
  if (drawing.tagName === "CANVAS") return mw.onCard(drawing.width, drawing.height, drawing);
  const box = drawing.getBoundingClientRect(), image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(mw.standAlone(drawing))}`;
  await image.decode();
  return mw.onCard(2 * box.width, 2 * box.height, image);
};
/* Charts and tables that scripts make bring their copies; every other drawing and table of a page gets them here. */
mw.addCopies = root => {
  for (const drawing of root.querySelectorAll("svg[role=img], canvas[role=img]")) {
    const place = drawing.closest("[data-live], .canvas-wrap, figure") || drawing, next = place.nextElementSibling;
    if (next && next.matches(".copies") || place.querySelector(".copy")) continue;
    const shown = () => [...place.parentElement.querySelectorAll("svg[role=img], canvas[role=img]")].find(item => place.contains(item) && item.getClientRects().length);
    place.after(mw.el("div", {class: "row copies no-print"}, mw.pngButton(drawing.getAttribute("aria-label") || "the drawing", () => mw.paintDrawing(shown()))));
  }
  for (const box of root.querySelectorAll("details.table-box")) {
    if (box.querySelector(".copies")) continue;
    const find = () => box.querySelector("table");
    if (find()) box.append(mw.el("div", {class: "row copies no-print"}, mw.rowCopies(() => mw.readTable(find()), find().caption ? find().caption.textContent : "the table")));
  }
};

mw.save = (name, content, type) => {
  const link = mw.el("a", {href: content instanceof Blob || type ? URL.createObjectURL(new Blob([content], {type})) : content, download: name});
  link.click();
};
