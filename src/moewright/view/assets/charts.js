"use strict";
/* Charts as SVG. A plot is data: two axes, marks, and what a pointer is told. Its colours are those of the style sheet, so
   that dark and light need no second drawing, and its texts are texts of the page.
   An axis has `names`, or a range `from` `to`, with `log` as the base of a logarithmic one; `show` writes its values. It ends
   at round values unless it `isExact`; ticks of one that `isWhole` are integers, of one that `isBytes` round in their unit.
   Marks: bar (at a name), curve (points, `step` for stairs), dots (points, each with its item), rule (a line at an x or y), band (a range of y). */
mw.svg = (tag, attributes = {}, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
mw.letters = {pen: null, widths: new Map()};
mw.textWidth = text => {
  const {widths} = mw.letters;
  if (!mw.letters.pen) {
    mw.letters.pen = mw.el("canvas").getContext("2d");
    mw.letters.pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  }
  if (!widths.has(text)) widths.set(text, mw.letters.pen.measureText(text).width);
  return widths.get(text);
};

/* The range of values; a single one gets room on both sides. */
mw.range = (values, axis = {}) => {
  let from = Infinity, to = -Infinity;
  for (const value of values) if (value !== null && Number.isFinite(value)) { from = Math.min(from, value); to = Math.max(to, value); }
  if (from > to) [from, to] = [0, 1];
  const room = from === to ? Math.abs(from) * .05 || 1 : 0;
  return {...axis, from: from - room, to: to + room};
};
mw.tickStep = (axis, count) => {
  const wanted = (axis.to - axis.from) / count, unit = axis.isBytes ? 1024 ** Math.max(0, Math.floor(Math.log2(wanted) / 10)) : 1;
  const rough = wanted / unit, scale = 10 ** Math.floor(Math.log10(rough));
  const step = unit * scale * [1, 2, 5, 10].find(digit => digit * scale >= rough * .999);
  return axis.isWhole ? Math.max(1, step) : step;
};
/* Round values of an axis, about `count` of them: of a logarithmic one powers of its base, or 1, 2 and 5 times those of ten. */
mw.ticks = (axis, count) => {
  const {from, to, log} = axis, near = 1e-9;
  if (log) {
    const powers = [], fine = [];
    for (let power = Math.ceil(Math.log(from) / Math.log(log) - near); log ** power <= to * (1 + near); power += 1) powers.push(log ** power);
    if (powers.length > 2) return powers.filter((_, place) => place % Math.ceil(powers.length / count) === 0);
    for (let power = Math.floor(Math.log10(from)); 10 ** power <= to; power += 1) fine.push(...[1, 2, 5].map(digit => digit * 10 ** power).filter(value => value >= from && value <= to));
    if (fine.length > 1) return fine;
  }
  const step = mw.tickStep(axis, count), ticks = [];
  for (let number = Math.ceil(from / step - near); number * step <= to + step * near; number += 1) ticks.push(number * step);
  return ticks;
};
/* An axis that ends at round values. */
mw.rounded = (axis, count) => {
  if (axis.log || axis.isExact) return axis;
  const step = mw.tickStep(axis, count);
  return {...axis, from: step * Math.floor(axis.from / step + 1e-9), to: step * Math.ceil(axis.to / step - 1e-9)};
};
mw.scale = (axis, start, end) => {
  if (axis.names) { const step = (end - start) / axis.names.length; return index => start + (index + .5) * step; }
  const shape = axis.log ? Math.log : value => value, low = shape(axis.from), high = shape(axis.to);
  return value => start + (shape(value) - low) / (high - low) * (end - start);
};
mw.boxesMeet = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];

/* Draws a plot; `find` says what is under a point of it. */
mw.drawPlot = (plot, width, height) => {
  const drawing = mw.svg("svg", {class: "plot", viewBox: `0 0 ${width} ${height}`, width, height});
  const lines = mw.svg("g", {class: "lines"}), shapes = mw.svg("g"), texts = mw.svg("g");
  const write = (text, x, y, anchor, kind) => texts.append(mw.svg("text", {x, y, "text-anchor": anchor, class: kind}, text));
  const hasTexts = plot.marks.some(mark => mark.text && mark.kind === "bar");
  let top = plot.y.name ? 26 : 8, used = 0;
  for (const entry of plot.legend || []) {
    const wide = mw.textWidth(entry.text) + 34;
    if (!used) top += 22;
    if (used && used + wide > width) { used = 0; top += 22; }
    const line = top - (plot.y.name ? 26 : 8) - 8;
    shapes.append(entry.isLine ? mw.svg("path", {d: `M${used} ${line - 4}h18`, stroke: entry.colour, "stroke-width": 1.5, "stroke-dasharray": "4 3"}) : mw.svg("circle", {cx: used + 10, cy: line - 4, r: 5, fill: entry.colour}));
    write(entry.text, used + 22, line, "start", "ink");
    used += wide;
  }
  const bottom = height - 24 - (plot.x.name ? 18 : 0), tall = Math.max(2, Math.floor((bottom - top) / 42));
  const y = plot.y.names ? plot.y : mw.rounded(plot.y, tall);
  const yTicks = y.names ? [] : mw.ticks(y, tall);
  const labels = y.names || yTicks.map(value => y.show(value)), figures = hasTexts && y.names ? plot.marks.map(mark => mark.text || "") : [];
  const [longest, reserved] = [labels, figures].map(list => 8 + Math.max(0, ...list.map(mw.textWidth)));
  /* Where names and figures leave too little room, a name stands above its bar. */
  const isNarrow = figures.length > 0 && longest + reserved > .55 * width, left = isNarrow ? 2 : longest;
  const right = width - Math.max(plot.right || 12, figures.length && !isNarrow ? reserved : 0), wide = Math.max(2, Math.floor((right - left) / 80));
  const x = plot.x.names ? plot.x : plot.y.names ? plot.x : mw.rounded(plot.x, wide);
  const atX = mw.scale(x, left, right), atY = y.names ? mw.scale(y, top, bottom) : mw.scale(y, bottom, top);
  const row = y.names ? (bottom - top) / y.names.length : (right - left) / (x.names ? x.names.length : 1);
  if (y.name) write(y.name, 0, top - 12, "start");
  if (x.name) write(x.name, (left + right) / 2, height - 5, "middle");
  yTicks.forEach((value, place) => {
    lines.append(mw.svg("path", {d: `M${left} ${atY(value)}H${right}`}));
    write(labels[place], left - 6, atY(value) + 4, "end");
  });
  if (y.names && !isNarrow) {
    const every = Math.ceil(14 / row);
    labels.forEach((name, place) => { if (place % every === 0) write(name, left - 6, atY(place) + 4, "end", "ink"); });
  }
  let free = -Infinity;
  const xTicks = x.names ? x.names.map((_, place) => place) : mw.ticks(x, wide);
  for (const value of xTicks) {
    const text = x.names ? x.names[value] : x.show(value), half = mw.textWidth(text) / 2, middle = Math.min(Math.max(atX(value), half), width - half);
    if (!x.names) lines.append(mw.svg("path", {d: `M${atX(value)} ${top}V${bottom}`}));
    if (middle - half < free) continue;
    write(text, middle, bottom + 18, "middle");
    free = middle + half + 8;
  }
  /* Marks outside of the axes' ranges are cut off. */
  const area = mw.svg("svg", {x: left, y: top, width: right - left, height: bottom - top, viewBox: `${left} ${top} ${right - left} ${bottom - top}`, overflow: plot.isCut ? "hidden" : "visible"});
  const taken = [];
  /* A text beside its mark, at the first place where it lies upon no other; nowhere if there is none. */
  const place = (text, kind, places) => {
    for (const [atLeft, line] of places) {
      const box = [atLeft, line - 11, atLeft + mw.textWidth(text), line + 3];
      if (box[0] < left || box[2] > width || box[1] < top - 12 || box[3] > bottom || taken.some(other => mw.boxesMeet(box, other))) continue;
      taken.push(box);
      write(text, atLeft, line, "start", `over ${kind}`);
      return;
    }
  };
  const draw = {
    bar: mark => {
      const room = isNarrow ? row - 15 : row * .72, thick = Math.max(.5, Math.min(plot.thick || Infinity, room));
      const [low, high] = [Math.min(mark.from, mark.to), Math.max(mark.from, mark.to)];
      if (y.names) {
        const edge = atY(mark.at) - row / 2, from = atX(low), long = Math.max(.5, atX(high) - from);
        area.append(mw.svg("rect", {x: from, y: isNarrow ? edge + 13 : edge + (row - thick) / 2, width: long, height: thick, fill: mark.colour, opacity: mark.opacity}));
        if (!mark.text) return;
        if (!isNarrow) { write(mark.text, from + long + 5, atY(mark.at) + 4, "start", "ink"); return; }
        write(y.names[mark.at], left, edge + 10, "start", "ink small");
        const behind = from + long + 5, before = from - 5, size = mw.textWidth(mark.text);
        if (behind + size <= width) write(mark.text, behind, edge + 22, "start", "ink small");
        else write(mark.text, before >= size ? before : width, before >= size ? edge + 22 : edge + 10, "end", "ink small");
      } else area.append(mw.svg("rect", {x: atX(mark.at) - thick / 2, y: atY(high), width: thick, height: Math.max(.5, atY(low) - atY(high)), fill: mark.colour}));
    },
    curve: mark => {
      let path = "", isOpen = false, last = 0;
      for (const [across, up] of mark.points) {
        if (up === null || !Number.isFinite(up)) { isOpen = false; continue; }
        const h = atX(across).toFixed(1), v = atY(up).toFixed(1);
        path += isOpen ? mark.step ? `H${h}V${v}` : `L${h} ${v}` : `M${h} ${v}`;
        isOpen = true;
        last = h;
      }
      if (mark.fill && path) area.append(mw.svg("path", {d: `${path}H${last}V${bottom}H${atX(mark.points[0][0]).toFixed(1)}Z`, fill: mark.colour, opacity: mark.fill}));
      area.append(mw.svg("path", {d: path, fill: "none", stroke: mark.colour, "stroke-width": mark.wide || 1.5, "stroke-dasharray": mark.dash ? "4 3" : null, "stroke-linejoin": "round", opacity: mark.opacity}));
      for (const [across, up] of mark.dots ? mark.points : []) area.append(mw.svg("circle", {cx: atX(across), cy: atY(up), r: mark.dots, fill: mark.colour}));
      for (const [across, up] of mark.text ? mark.points : []) place(mark.text(up), "ink", [[atX(across) + 4, atY(up) - 8], [atX(across) + 8, atY(up) + 4], [atX(across) + 2, atY(up) + 18]]);
    },
    /* One shape for all dots of a mark, each a circle of its own outline: hundreds of elements are slow to lay out. */
    dots: mark => {
      const circle = point => `M${(atX(point.x) - mark.r).toFixed(1)} ${atY(point.y).toFixed(1)}a${mark.r} ${mark.r} 0 1 0 ${2 * mark.r} 0a${mark.r} ${mark.r} 0 1 0 ${-2 * mark.r} 0`;
      area.append(mw.svg("path", {d: mark.points.map(circle).join(""), fill: mark.colour, opacity: mark.opacity, stroke: "var(--card)"}));
    },
    rule: mark => {
      const isLevel = mark.y !== undefined, at = isLevel ? atY(mark.y) : atX(mark.x);
      area.append(mw.svg("path", {d: isLevel ? `M${left} ${at}H${right}` : `M${at} ${top}V${bottom}`, stroke: mark.colour, "stroke-width": mark.wide || 1, "stroke-dasharray": mark.dash ? "4 3" : null}));
      if (!mark.text) return;
      const long = mw.textWidth(mark.text);
      place(mark.text, "", isLevel ? [right - long, left + 4].flatMap(start => [[start, at - 5], [start, at + 15]]) : [0, 1, 2, 3].flatMap(line => [[at + 4, top + 12 + 16 * line], [at - 4 - long, top + 12 + 16 * line]]));
    },
    band: mark => area.append(mw.svg("rect", {x: left, y: atY(mark.to), width: right - left, height: atY(mark.from) - atY(mark.to), fill: mark.colour, opacity: .16})),
  };
  const shadow = mw.svg("rect", {class: "shadow", width: 0, height: 0});
  for (const mark of plot.marks) draw[mark.kind](mark);
  drawing.append(lines, shadow, shapes, area, texts);
  const show = (fromX, fromY, long, high) => { for (const [name, value] of Object.entries({x: fromX, y: fromY, width: long, height: high})) shadow.setAttribute(name, value); };
  const dots = plot.marks.filter(mark => mark.kind === "dots").flatMap(mark => mark.points.map(point => ({...point, r: mark.r}))), curves = plot.marks.filter(mark => mark.kind === "curve" && !mark.isSilent);
  const find = (h, v) => {
    show(0, 0, 0, 0);
    if (v < top || v > bottom || h < (y.names ? 0 : left) || h > (y.names ? width : right)) return null;
    if (y.names || x.names) {
      const index = Math.min(Math.floor(y.names ? (v - top) / row : (h - left) / row), (y.names || x.names).length - 1);
      if (y.names) show(0, top + index * row, width, row); else show(left + index * row, top, row, bottom - top);
      return {told: plot.tip(index), item: null};
    }
    if (dots.length) {
      const far = dot => Math.hypot(atX(dot.x) - h, atY(dot.y) - v) - dot.r;
      const nearest = dots.reduce((best, dot) => far(dot) <= far(best) ? dot : best);
      return far(nearest) < 10 ? {told: plot.tip(nearest.item), item: nearest.item} : null;
    }
    const read = curve => {
      const points = curve.points.filter(point => point[1] !== null && (!curve.step || atX(point[0]) <= h));
      if (!points.length) return [];
      const point = curve.step ? points.at(-1) : points.reduce((best, other) => Math.abs(atX(other[0]) - h) < Math.abs(atX(best[0]) - h) ? other : best);
      return [{curve, point, far: curve.step ? 0 : Math.abs(atX(point[0]) - h)}];
    };
    const readings = curves.flatMap(read), least = Math.min(...readings.map(reading => reading.far));
    if (!readings.length) return null;
    show(h, top, 1, bottom - top);
    return {told: plot.tip(readings.filter(reading => reading.far <= Math.max(10, least))), item: null};
  };
  return {drawing, find, value: h => x.log ? x.from * (x.to / x.from) ** ((h - left) / (right - left)) : x.from + (h - left) / (right - left) * (x.to - x.from)};
};

/* A chart that follows the width of its box; `plot` makes it for a width and the parts that are hidden. */
mw.chart = (label, height, plot) => {
  const tip = mw.el("div", {class: "tip", hidden: true});
  const box = mw.el("div", {class: "chart", role: "img", "aria-label": label, style: `height:${height}px`});
  const holder = mw.el("div", {}, box, mw.el("div", {class: "row copies no-print"}, mw.pngButton(label, () => mw.paintDrawing(box.firstChild))));
  const item = {box, plot, hidden: new Set(), width: 0, pick: null, drawn: null};
  item.draw = () => {
    if (!item.width) return;
    item.drawn = mw.drawPlot(item.plot(item.width, item.hidden), item.width, height);
    tip.hidden = true;
    box.replaceChildren(item.drawn.drawing, tip);
  };
  const find = event => { const frame = box.getBoundingClientRect(); return item.drawn ? [item.drawn.find(event.clientX - frame.left, event.clientY - frame.top), event.clientX - frame.left, event.clientY - frame.top] : [null]; };
  const tell = event => {
    const [place, h, v] = find(event);
    tip.hidden = !place;
    box.style.cursor = place && place.item && item.pick ? "pointer" : "";
    if (!place) return;
    tip.replaceChildren(...place.told);
    tip.style.left = `${Math.max(0, Math.min(h + 14, item.width - tip.offsetWidth))}px`;
    tip.style.top = `${v + 16}px`;
  };
  box.addEventListener("pointermove", tell);
  box.addEventListener("pointerdown", tell);
  box.addEventListener("pointerleave", () => { tip.hidden = true; if (item.drawn) item.drawn.find(-1, -1); });
  box.addEventListener("click", event => { const [place] = find(event); if (place && place.item && item.pick) item.pick(place.item); });
  new ResizeObserver(entries => { const wide = Math.round(entries.at(-1).contentRect.width); if (wide !== item.width) { item.width = wide; item.draw(); } }).observe(box);
  holder.item = item;
  return holder;
};
mw.tipLine = (colour, text) => mw.el("div", {}, mw.el("i", {class: "swatch", style: `background:${colour}`}), " ", text);
mw.tipTitle = text => mw.el("b", {}, text);

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

/* Parts that lie upon each other, by name; `rows` is a list of values of each. */
mw.stacked = parts => {
  const at = parts.length ? parts[0].values.map(() => 0) : [];
  return parts.flatMap(part => part.values.map((value, index) => { const from = at[index]; at[index] += value; return {kind: "bar", at: index, from, to: at[index], colour: part.colour}; }).filter(bar => bar.to > bar.from));
};
/* A waterfall of horizontal bars: each begins where the one above ends. */
mw.waterfall = (steps, show) => ({
  x: {from: 0, to: Math.max(...steps.map(step => Math.max(step.from, step.to))), show, isExact: true},
  y: {names: steps.map(step => step.label)},
  marks: steps.map((step, at) => ({kind: "bar", at, from: step.from, to: step.to, colour: step.colour, opacity: step.opacity, text: step.text})),
  tip: index => [mw.tipTitle(steps[index].label), mw.el("div", {}, steps[index].tip || steps[index].text)],
});
