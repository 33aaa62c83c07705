"use strict";
/* Elements, numbers and charts that every page of moewright shares. All text goes in as text. */
const mw = {render: {}, charts: new Set(), palette: {}};

mw.el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") node.style.cssText = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined));
  return node;
};
mw.escape = text => String(text).replace(/[&<>"']/g, letter => `&#${letter.charCodeAt(0)};`);

mw.digits = (value, count = 3) => {
  if (!Number.isFinite(value)) return "–";
  const text = Number(value.toPrecision(count));
  return Math.abs(text) >= 1e3 ? Math.round(value).toLocaleString("en-US") : String(text);
};
mw.seconds = value => {
  const size = Math.abs(value);
  if (size >= 1000) return `${mw.count(value)} s`;
  if (size >= 1 || size === 0) return `${mw.digits(value)} s`;
  if (size >= 1e-3) return `${mw.digits(value * 1e3)} ms`;
  return `${mw.digits(value * 1e6)} µs`;
};
mw.bytes = value => {
  const size = Math.abs(value);
  for (const [unit, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
    if (size >= scale) return `${mw.digits(value / scale)} ${unit}`;
  return `${Math.round(value)} B`;
};
mw.percent = (value, decimals = 1) => `${(100 * value).toFixed(decimals)}%`;
mw.count = value => Math.round(value).toLocaleString("en-US");
mw.words = name => name.replaceAll("_", " ");
mw.signed = (value, show) => `${value < 0 ? "−" : "+"}${show(Math.abs(value))}`;

/* A tile carries the exact value: `data-name` is its key in `estimate --json`. */
mw.tile = (label, text, note, name, value) => mw.el("div", {class: "tile"},
  mw.el("span", {}, label),
  mw.el("b", {"data-name": name, "data-value": value === undefined ? null : String(value), title: value === undefined ? null : String(value)}, text),
  mw.el("small", {}, note || ""));

/* What stands where an answer will be. */
mw.skeleton = (...heights) => heights.map(height => mw.el("div", {class: "panel skeleton", style: `height:${height}px`, "aria-hidden": "true"}));

mw.panel = (title, ...children) => mw.el("section", {class: "panel"}, title ? mw.el("div", {class: "head"}, mw.el("h2", {}, title)) : "", ...children);

mw.wide = node => { node.classList.add("span"); return node; };

mw.table = (columns, rows, caption) => {
  const cells = row => columns.map((column, index) => mw.el("td", {class: column.n ? "n" : null, "data-label": column.t || null}, row[index]));
  const text = cell => (cell instanceof Node ? cell.textContent : String(cell ?? "")).trim();
  const lines = [columns.map(column => column.t), ...rows.map(row => columns.map((column, index) => text(row[index])))];
  const quote = cell => /[",\n]/.test(cell) ? `"${cell.replaceAll('"', '""')}"` : cell;
  const markdown = [lines[0], lines[0].map(() => "---"), ...lines.slice(1)].map(line => `| ${line.map(cell => cell.replaceAll("|", "\\|")).join(" | ")} |`).join("\n");
  const copies = mw.el("div", {class: "row copies no-print"}, mw.copyButton(lines.map(line => line.map(quote).join(",")).join("\n"), `${caption} as CSV`, "CSV"), mw.copyButton(markdown, `${caption} as Markdown`, "Markdown"));
  return mw.el("div", {}, mw.el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
    mw.el("table", {}, mw.el("caption", {class: "visually-hidden"}, caption),
      mw.el("thead", {}, mw.el("tr", {}, columns.map(column => mw.el("th", {class: column.n ? "n" : null, scope: "col"}, column.t)))),
      mw.el("tbody", {}, rows.map(row => mw.el("tr", {}, cells(row)))))), rows.length > 1 ? copies : "");
};

/* Text that may wrap behind commas and bars, where no space is; what is copied stays the same. */
mw.breakable = text => String(text).split(/(?<=[,|+])(?=\S)/).flatMap((part, place) => place ? [mw.el("wbr"), part] : [part]);
mw.copyButton = (text, name, shown = "Copy") => mw.el("button", {type: "button", class: "small copy no-print", title: shown === "Copy" ? text : null, "aria-label": `copy ${name}`, onclick: event => {
  const done = () => { event.target.textContent = "Copied"; setTimeout(() => { event.target.textContent = shown; }, 1500); };
  if (navigator.clipboard) { navigator.clipboard.writeText(text).then(done, () => prompt(name, text)); } else prompt(name, text);
}}, shown);
/* A layout in a list: in words, its text behind a button; `pick` loads it. */
mw.layoutCell = (text, words, pick) => mw.el("div", {class: "layout-cell", "data-layout": text},
  pick ? mw.el("button", {type: "button", class: "small pick", onclick: pick}, words || mw.breakable(text)) : mw.el("span", {}, words || mw.el("code", {}, mw.breakable(text))),
  " ", mw.copyButton(text, "the layout's text"));

mw.colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
mw.textStyle = () => ({color: mw.colour("ink"), fontFamily: getComputedStyle(document.body).fontFamily, fontSize: 12});

/* A chart that is drawn anew when its box or the colours of the system change. */
mw.chart = (label, height, option, alternative) => {
  const box = mw.el("div", {class: "chart", role: "img", "aria-label": label, style: `height:${height}px`});
  const holder = mw.el("div", {}, box, alternative || "");
  const item = {box, chart: null, option, label, hidden: new Set()};
  item.draw = () => {
    if (!box.isConnected) { if (item.chart) item.chart.dispose(); mw.charts.delete(item); return; }
    if (!item.chart) item.chart = echarts.init(box, null, {renderer: "canvas"});
    const built = item.option(box.clientWidth, item.hidden);
    item.chart.setOption({animation: false, textStyle: mw.textStyle(), ...built}, true);
  };
  item.update = next => { item.option = next; item.draw(); };
  item.resize = () => { if (item.chart && box.isConnected) { item.chart.resize(); } item.draw(); };
  holder.item = item;
  mw.charts.add(item);
  return holder;
};
mw.drawAll = root => { for (const item of mw.charts) if (!root || root.contains(item.box)) item.draw(); };
let resizing = 0;
addEventListener("resize", () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(() => mw.charts.forEach(item => item.resize())); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => mw.charts.forEach(item => item.draw()));
addEventListener("beforeprint", () => mw.charts.forEach(item => item.resize()));

mw.axis = extra => ({
  axisLine: {lineStyle: {color: mw.colour("line")}}, axisTick: {show: false},
  axisLabel: {color: mw.colour("quiet"), ...(extra && extra.axisLabel)},
  splitLine: {lineStyle: {color: mw.colour("line"), opacity: .6}},
  nameTextStyle: {color: mw.colour("quiet")}, ...Object.fromEntries(Object.entries(extra || {}).filter(([key]) => key !== "axisLabel")),
});
mw.tooltip = (formatter, trigger = "axis") => ({
  trigger, confine: true, backgroundColor: mw.colour("card"), borderColor: mw.colour("line"),
  textStyle: {color: mw.colour("ink"), fontSize: 12}, axisPointer: {type: "shadow", shadowStyle: {opacity: .12}}, formatter,
});
mw.mark = colour => `<i style="display:inline-block;width:.7em;height:.7em;border-radius:2px;background:${colour}"></i> `;

/* A legend of buttons: a click hides a part of a chart. */
mw.legend = (holder, names, colours) => {
  const buttons = names.map(name => {
    const button = mw.el("button", {type: "button", "aria-pressed": "true"}, mw.el("i", {style: `background:${colours[name]}`}), mw.words(name));
    button.addEventListener("click", () => {
      const {hidden} = holder.item;
      if (hidden.has(name)) hidden.delete(name); else hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      holder.item.draw();
    });
    return button;
  });
  return mw.el("div", {class: "legend no-print", role: "group", "aria-label": "shown parts"}, buttons);
};
mw.save = (name, content, type) => {
  const link = mw.el("a", {href: content instanceof Blob || type ? URL.createObjectURL(new Blob([content], {type})) : content, download: name});
  link.click();
};
