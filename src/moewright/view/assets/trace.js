"use strict";
/* A traced step: the parts of every rank, ranks beside their mean, and the longest step over time. */
mw.tracePart = name => {
  const time = mw.palette.time;
  const fixed = {"compute": time.experts, "exposed TP": time.tp_comm, "exposed CP": time.cp_comm, "exposed EP": time.ep_comm, "exposed all-to-all": time.ep_comm, "exposed PP": time.pp_comm, "exposed DP": time.dp_comm, "exposed other": time.recompute, "copies not hidden": time.offload,
    "idle": time.bubble, "idle: device": time.bubble, "idle: host work": time.host, "idle: launch-bound": time.optimizer, "idle: synchronisation": time.head, "idle: data loading": time.elementwise, "idle: garbage collection": time.dense};
  return fixed[name] || time.bubble;
};
mw.rankBars = trace => {
  const names = trace.parts.map(part => part.part), colours = Object.fromEntries(names.map(name => [name, mw.tracePart(name)]));
  const plot = (width, hidden) => {
    const shown = trace.parts.filter(part => !hidden.has(part.part));
    const marks = mw.stacked(shown.map(part => ({colour: colours[part.part], values: part.seconds})));
    return {marks, thick: 26, x: {...mw.range([0, ...marks.map(mark => mark.to)]), from: 0, show: mw.seconds}, y: {names: trace.ranks.map(rank => `rank ${rank}`)},
      tip: index => [mw.tipTitle(`rank ${trace.ranks[index]}`), ...shown.filter(part => part.seconds[index]).map(part => mw.tipLine(colours[part.part], `${part.part}: ${mw.seconds(part.seconds[index])}`))]};
  };
  const holder = mw.chart("Seconds a step of every rank, by part", 44 + Math.min(24 * trace.ranks.length, 900) + (trace.ranks.length < 3 ? 24 : 0), plot);
  holder.append(mw.legend(holder, names, colours), mw.el("details", {}, mw.el("summary", {class: "note"}, "Exact seconds"),
    mw.table([{t: "part"}, ...trace.ranks.map(rank => ({t: `rank ${rank}`, n: true}))], trace.parts.map(part => [part.part, ...part.seconds.map(mw.seconds)]), "Seconds a step of every rank")));
  return holder;
};
mw.rankHeat = trace => {
  const rows = trace.parts.map(part => ({part: part.part, mean: part.seconds.reduce((sum, value) => sum + value, 0) / part.seconds.length, seconds: part.seconds})).filter(row => row.mean > 0);
  const lines = () => [["part", ...trace.ranks.map(rank => `rank ${rank}`)], ...rows.map(row => [row.part, ...row.seconds.map(seconds => (seconds / row.mean).toFixed(2))])];
  return mw.el("div", {}, mw.el("div", {class: "heat", id: "rank-heat", role: "img", "aria-label": "Seconds of every rank over the mean of all ranks, by part"}, rows.map(row => mw.el("div", {class: "heatrow part"}, mw.el("span", {class: "n"}, row.part),
    mw.el("div", {class: "cells"}, row.seconds.map((seconds, index) => mw.el("i", {style: `background:${seconds > 0 ? mw.heatColour(seconds / row.mean) : "transparent"}`, title: `rank ${trace.ranks[index]}, ${row.part}: ${mw.seconds(seconds)}, ${(seconds / row.mean).toFixed(2)} × the mean`}))),
    mw.el("b", {}, (Math.max(...row.seconds) / row.mean).toFixed(2))))),
  mw.el("div", {class: "row copies no-print"}, mw.rowCopies(lines, "ranks beside their mean")));
};
mw.stepStrip = worst => {
  const lane = 20, top = 4, left = 132, height = top + lane * worst.lanes.length + 22;
  const canvas = mw.el("canvas", {class: "strip", role: "img", "aria-label": `The longest step, ${mw.seconds(worst.length_s)}, over time: ${worst.lanes.map(item => item.part).join(", ")}`});
  const tip = mw.el("div", {class: "tip", hidden: true});
  const unit = () => (canvas.clientWidth - left - 8) / worst.length_s;
  const draw = () => {
    if (!canvas.isConnected) return;
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth, pen = canvas.getContext("2d");
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); canvas.style.height = `${height}px`;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
    worst.lanes.forEach((item, index) => {
      const y = top + index * lane;
      pen.fillStyle = mw.colour("track"); pen.fillRect(left, y + 1, width - left - 8, lane - 3);
      pen.fillStyle = mw.colour("ink"); pen.textAlign = "right"; pen.fillText(item.part, left - 8, y + lane / 2);
      pen.fillStyle = mw.tracePart(item.part);
      for (const [start, length] of item.spans) pen.fillRect(left + start * unit(), y + 1, Math.max(.6, length * unit()), lane - 3);
    });
    pen.fillStyle = mw.colour("quiet");
    for (let mark = 0; mark <= 4; mark += 1) { pen.textAlign = mark === 0 ? "left" : mark === 4 ? "right" : "center"; pen.fillText(mw.seconds(worst.length_s * mark / 4), left + worst.length_s * mark / 4 * unit(), height - 9); }
  };
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect(), time = (event.clientX - box.left - left) / unit(), item = worst.lanes[Math.floor((event.clientY - box.top - top) / lane)];
    const span = item && item.spans.find(([start, length]) => time >= start - 1 / unit() && time <= start + length + 1 / unit());
    tip.hidden = !span;
    if (span) { tip.textContent = `${item.part}: ${mw.seconds(span[1])} from ${(worst.start_s + span[0]).toFixed(6)} s of the trace on`; tip.style.left = `${Math.min(event.clientX - box.left + 12, canvas.clientWidth - tip.offsetWidth)}px`; tip.style.top = `${event.clientY - box.top + 14}px`; }
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return mw.el("div", {class: "canvas-wrap"}, canvas, tip);
};
mw.tracePanels = trace => {
  const panel = mw.panel("Where the step goes on every rank", mw.rankBars(trace));
  panel.id = "ranks";
  if (trace.ranks.length > 1) panel.append(mw.el("h3", {style: "margin-top:.7rem"}, "Ranks beside each other"), mw.el("p", {class: "note"}, "A row a part, a cell a rank; blue takes less than the mean of the ranks, orange more; the figure is the longest over the mean."), mw.rankHeat(trace));
  const panels = [panel];
  if (trace.worst) {
    const strip = mw.panel("The longest step over time", mw.el("p", {class: "note"}, `${mw.seconds(trace.worst.length_s)} on rank ${trace.worst.rank}${trace.worst.number ? `, marked step ${trace.worst.number}` : ""}, from ${trace.worst.start_s.toFixed(6)} s of the trace on. Communication that lies under compute is not shown.`), mw.stepStrip(trace.worst));
    strip.id = "worst-step";
    panels.push(strip);
  }
  return panels;
};
