"use strict";
/* The timetable of a step on a canvas: drag and wheel to move and zoom, point for a row. */
mw.unpack = (text, kind) => { const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0)); return new kind(bytes.buffer); };

mw.render.TimetableView = (view, root) => {
  const started = performance.now();
  const rows = {kind: mw.unpack(view.kinds, Uint8Array), batch: mw.unpack(view.micro_batches, Uint32Array), chunk: mw.unpack(view.chunks, Uint8Array), start: mw.unpack(view.starts, Float64Array), length: mw.unpack(view.lengths, Float64Array)};
  const names = ["F", "B", "W"], words = {F: "forward", B: "backward", W: "weight gradients"};
  const state = {from: 0, to: view.end_s, rank: 0, hover: null};
  const canvas = mw.el("canvas", {class: "timetable", tabindex: "0", role: "img", "aria-label": `Timetable of ${view.ranks} pipeline ranks and ${view.micro_batch_count} micro-batches; arrow keys move, plus and minus zoom`});
  const tip = mw.el("div", {class: "tip", hidden: true});
  const left = 34, lane = Math.max(9, Math.min(26, Math.floor(430 / view.ranks))), top = 4;
  const height = top + lane * view.ranks + 22;
  const memory = mw.chart("Memory of a rank over the step", 220, () => memoryPlot());
  const scale = () => (canvas.clientWidth - left - 6) / (state.to - state.from);
  const first = (rank, time) => { // the first row of a rank that ends after a time
    let low = rank * view.rows, high = low + view.rows;
    while (low < high) { const middle = (low + high) >> 1; if (rows.start[middle] + rows.length[middle] < time) low = middle + 1; else high = middle; }
    return low;
  };
  const draw = () => {
    if (!canvas.isConnected) return;
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = `${height}px`; }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const unit = scale(), ink = mw.colour("ink"), colours = names.map(name => mw.palette.row[name]);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (let rank = 0; rank < view.ranks; rank += 1) {
      const y = top + rank * lane;
      pen.fillStyle = mw.colour("track");
      pen.fillRect(left, y + 1, width - left - 6, lane - 2);
      pen.fillStyle = rank === state.rank ? mw.colour("accent") : mw.colour("quiet");
      pen.textAlign = "right";
      if (lane >= 12 || rank % 4 === 0) pen.fillText(String(rank), left - 6, y + lane / 2);
      pen.textAlign = "center";
      let painted = -1;
      for (let at = first(rank, state.from), end = (rank + 1) * view.rows; at < end && rows.start[at] < state.to; at += 1) {
        const x = left + Math.max(0, rows.start[at] - state.from) * unit, right = left + Math.min(state.to - state.from, rows.start[at] + rows.length[at] - state.from) * unit;
        if (right <= painted + .25 || !rows.length[at]) continue; // nothing of it would be seen
        painted = right;
        const wide = right - x;
        pen.fillStyle = colours[rows.kind[at]];
        pen.globalAlpha = 1 - .22 * Math.min(2, rows.chunk[at]);
        pen.fillRect(x, y + 1, Math.max(.5, wide - (wide > 3 ? 1 : 0)), lane - 2);
        pen.globalAlpha = 1;
        if (wide > 17 && lane >= 12) { pen.fillStyle = "#fff"; pen.fillText(String(rows.batch[at]), x + wide / 2, y + lane / 2); }
      }
    }
    pen.fillStyle = ink; pen.textAlign = "left";
    for (let mark = 0; mark <= 4; mark += 1) {
      const time = state.from + (state.to - state.from) * mark / 4;
      pen.textAlign = mark === 0 ? "left" : mark === 4 ? "right" : "center";
      pen.fillText(mw.seconds(time), left + (time - state.from) * unit, height - 9);
    }
  };
  const memoryPlot = () => {
    const rank = state.rank, saved = view.saved_bytes[rank], gib = 2 ** 30, points = [];
    let held = 0, most = 0;
    const events = [];
    for (let at = rank * view.rows, end = at + view.rows; at < end; at += 1) {
      if (!rows.length[at]) continue;
      const kind = names[rows.kind[at]];
      if (kind === "F") events.push([rows.start[at] + rows.length[at], saved[rows.chunk[at]]]);
      else if (kind === "B" && !splits.has(rank * 1e9 + rows.batch[at] * 64 + rows.chunk[at]) || kind === "W") events.push([rows.start[at] + rows.length[at], -saved[rows.chunk[at]]]);
    }
    events.sort((a, b) => a[0] - b[0]);
    for (const [time, change] of events) { held += change; most = Math.max(most, held); points.push([time, held]); }
    const base = view.peaks[rank] - most;
    const every = Math.max(1, Math.ceil(points.length / 1500));
    const data = [[0, base / gib], ...points.filter((_, index) => index % every === 0 || points.length < 3000).map(([time, value]) => [time, (base + value) / gib]), [view.end_s, base / gib]];
    return {
      isCut: true,
      x: {from: state.from, to: state.to, isExact: true, show: mw.seconds},
      y: mw.range([0, ...data.map(point => point[1] * 1.05), view.capacity_bytes / gib * 1.05], {name: `GiB on rank ${rank}`, show: mw.digits}),
      marks: [{kind: "curve", step: true, colour: mw.palette.memory.activations, wide: 1.2, fill: .35, points: data}, {kind: "rule", y: view.capacity_bytes / gib, colour: "var(--bad)", wide: 2}],
      tip: ([reading]) => [`${mw.seconds(reading.point[0])}: ${mw.bytes(reading.point[1] * gib)}`],
    };
  };
  const splits = new Set();
  for (let at = 0; at < rows.kind.length; at += 1) if (rows.kind[at] === 2 && rows.length[at]) splits.add(Math.floor(at / view.rows) * 1e9 + rows.batch[at] * 64 + rows.chunk[at]);
  const clamp = (from, to) => {
    const span = Math.min(view.end_s, Math.max(view.end_s / 4000, to - from));
    state.from = Math.min(Math.max(0, from), view.end_s - span); state.to = state.from + span;
    draw(); memory.item.draw();
  };
  const zoom = (factor, at = (state.from + state.to) / 2) => clamp(at - (at - state.from) * factor, at + (state.to - at) * factor);
  const place = event => { const box = canvas.getBoundingClientRect(); return [state.from + (event.clientX - box.left - left) / scale(), Math.floor((event.clientY - box.top - top) / lane), event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("wheel", event => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : .8, place(event)[0]); }, {passive: false});
  let grabbed = null;
  canvas.addEventListener("pointerdown", event => { grabbed = {x: event.clientX, from: state.from, to: state.to, moved: false}; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", event => { if (grabbed && !grabbed.moved) { const rank = place(event)[1]; if (rank >= 0 && rank < view.ranks) { state.rank = rank; select.value = String(rank); draw(); memory.item.draw(); } } grabbed = null; });
  canvas.addEventListener("pointermove", event => {
    if (grabbed) { const shift = (grabbed.x - event.clientX) / scale(); if (Math.abs(grabbed.x - event.clientX) > 3) grabbed.moved = true; clamp(grabbed.from + shift, grabbed.to + shift); return; }
    const [time, rank, x, y] = place(event);
    tip.hidden = true;
    if (rank < 0 || rank >= view.ranks || time < state.from) return;
    const at = first(rank, time);
    const isRow = at < (rank + 1) * view.rows && rows.start[at] <= time && rows.length[at] > 0;
    tip.replaceChildren(isRow ? `${names[rows.kind[at]]}${rows.batch[at]} (${words[names[rows.kind[at]]]}), chunk ${rows.chunk[at]}, rank ${rank}: ${mw.seconds(rows.length[at])} from ${mw.seconds(rows.start[at])}` : `rank ${rank} is idle`);
    tip.hidden = false;
    tip.style.top = `${y + 14}px`;
    tip.style.left = `${Math.max(0, Math.min(x + 12, canvas.clientWidth - tip.offsetWidth))}px`;
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("keydown", event => {
    const span = state.to - state.from, moves = {ArrowLeft: -.2, ArrowRight: .2};
    if (event.key in moves) { clamp(state.from + moves[event.key] * span, state.to + moves[event.key] * span); event.preventDefault(); }
    else if (event.key === "+" || event.key === "=") zoom(.8); else if (event.key === "-") zoom(1.25); else if (event.key === "0") clamp(0, view.end_s);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") { state.rank = (state.rank + (event.key === "ArrowDown" ? 1 : view.ranks - 1)) % view.ranks; select.value = String(state.rank); draw(); memory.item.draw(); event.preventDefault(); }
  });
  const select = mw.el("select", {style: "width:auto", id: "memory-rank", onchange: event => { state.rank = Number(event.target.value); draw(); memory.item.draw(); }}, view.peaks.map((_, rank) => mw.el("option", {value: String(rank)}, String(rank))));
  const key = mw.el("div", {class: "legend"}, [...names.filter((_, index) => rows.kind.includes(index)).map(name => [name, `${name}: ${words[name]}`, mw.palette.row[name]]), ["idle", "idle", "var(--track)"]].map(([, text, colour]) => mw.el("span", {class: "row"}, mw.el("i", {class: "swatch", style: `background:${colour}`}), text)), mw.el("span", {class: "note"}, "lighter: later chunks; numbers are micro-batches"));
  root.append(mw.el("section", {class: "panel verdict", id: "timetable"}, mw.el("h1", {}, `Idle ${mw.seconds(view.idle_s)}, ${mw.percent(view.idle_s / view.step_s, 2)} of the step`),
    mw.el("p", {}, `On the rank that works longest; ${view.ranks} ranks, ${mw.count(view.micro_batch_count)} micro-batches, ${mw.seconds(view.end_s)} to the last backward${view.transfer_s ? `, ${mw.seconds(view.transfer_s)} of transfers come on top` : ""}.`),
    mw.el("span", {class: "visually-hidden", "data-idle": String(view.idle_s), "data-bubble": String(view.bubble_s)})),
  mw.panel("Timetable", mw.el("div", {class: "row no-print"}, mw.el("button", {type: "button", class: "small", onclick: () => zoom(.6)}, "Zoom in"), mw.el("button", {type: "button", class: "small", onclick: () => zoom(1.7)}, "Zoom out"), mw.el("button", {type: "button", class: "small", onclick: () => clamp(0, view.end_s)}, "All"), mw.el("label", {for: "memory-rank"}, "memory of rank"), select),
    mw.el("div", {class: "canvas-wrap", style: "margin-top:.5rem"}, canvas, tip), key, mw.el("h3", {style: "margin-top:.8rem"}, "Memory over the step"), mw.el("p", {class: "note"}, "What forwards keep until their backward, over the rest of the predicted peak."), memory));
  const observer = new ResizeObserver(draw);
  observer.observe(canvas);
  requestAnimationFrame(() => { draw(); document.documentElement.dataset.timetable = String(performance.now() - started); });
};
