"use strict";
/* The record of a run: verdict, waterfall with priced fixes, loss, experts, time, memory, plan, ledger. */
mw.dropColour = drop => {
  const palette = {...mw.palette.time, "waiting: gradients and weights": mw.palette.time.dp_comm, "waiting: expert dispatch": mw.palette.time.ep_comm, "waiting: tensor parallelism": mw.palette.time.tp_comm, "waiting: context parallelism": mw.palette.time.cp_comm, "waiting: pipeline": mw.palette.time.pp_comm,
    "pipeline bubble": mw.palette.time.bubble, "exposed TP communication": mw.palette.time.tp_comm, "exposed CP communication": mw.palette.time.cp_comm, "exposed EP communication": mw.palette.time.ep_comm, "exposed PP communication": mw.palette.time.pp_comm, "exposed DP communication": mw.palette.time.dp_comm, "elementwise kernels": mw.palette.time.elementwise, "unexplained": mw.palette.memory.fragmentation, "work below the peak rate": mw.palette.time.experts, "products and attention below the peak rate": mw.palette.time.experts, "uneven expert load": mw.palette.time.head};
  return palette[drop.name] || mw.palette.time.host;
};
mw.waterfallChart = waterfall => {
  const build = () => {
    let at = waterfall.ideal_s;
    const steps = [{label: "ideal step", from: 0, to: at, colour: "var(--good)", text: mw.seconds(at), tip: waterfall.ideal_note}];
    for (const drop of waterfall.drops) {
      steps.push({label: drop.name, from: at, to: at + drop.seconds, colour: mw.dropColour(drop), opacity: drop.basis === "predicted" ? .65 : 1, text: `${mw.signed(drop.seconds, mw.seconds)} ${mw.percent(drop.seconds / waterfall.measured_s, 0)}`, tip: `${mw.signed(drop.seconds, mw.seconds)}, ${drop.basis}${drop.note ? `: ${drop.note}` : ""}`});
      at += drop.seconds;
    }
    steps.push({label: "measured step", from: 0, to: waterfall.measured_s, colour: "var(--quiet)", text: mw.seconds(waterfall.measured_s)});
    return steps;
  };
  return mw.chart(`From the ideal step of ${mw.seconds(waterfall.ideal_s)} to the measured ${mw.seconds(waterfall.measured_s)}`, 46 + 25 * (waterfall.drops.length + 2), () => mw.waterfall(build(), mw.seconds));
};

mw.diagnosisPanels = view => {
  const panel = mw.panel("What holds it back, and what can be done about it");
  panel.id = "findings";
  if (view.advice) panel.append(mw.el("h3", {}, "What to change, the most gainful first"), mw.part(view.advice));
  if (view.waterfall) panel.append(view.waterfall.ideal_s > view.waterfall.measured_s ? mw.el("p", {class: "error"}, "The job as described would take longer at the peak rate than was measured: it is not the job that ran.") : mw.waterfallChart(view.waterfall));
  panel.append(...view.walls.map(mw.part));
  if (!view.walls.length) panel.append(mw.el("p", {class: "quiet"}, "No wall was found."));
  const notes = view.notes.filter(note => !view.judgement || note !== view.headline);
  if (notes.length) panel.append(mw.el("ul", {class: "plain note"}, notes.map(note => mw.el("li", {}, note))));
  return panel;
};
mw.judgedPanel = (judgement, headline) => {
  const panel = mw.panel("", mw.el("h1", {}, judgement.headline), headline ? mw.el("p", {class: "words"}, headline) : "", ...mw.judgementLines(judgement, null));
  panel.className = `panel verdict ${mw.qualityClass[judgement.quality]}`;
  panel.id = "verdict";
  return panel;
};
mw.render.DiagnosisView = (view, root) => { root.append(...(view.judgement ? [mw.judgedPanel(view.judgement, view.headline)] : []), mw.diagnosisPanels(view), ...(view.trace ? mw.tracePanels(view.trace) : [])); };

/* Curves over the steps, with zoom, a legend that switches them, and smoothing. */
mw.smooth = (points, span) => {
  if (span <= 1) return points;
  let mean = null;
  const keep = 1 - 1 / span;
  return points.map(([x, y]) => { if (y === null || !Number.isFinite(y)) return [x, null]; mean = mean === null ? y : keep * mean + (1 - keep) * y; return [x, mean]; });
};
mw.curves = (label, curves, options) => {
  const named = Object.fromEntries(curves.map(curve => [curve.name, curve.colour]));
  const {from: first, to: last} = mw.range(curves.flatMap(curve => curve.points.map(point => point[0])));
  const state = {span: 1, from: first, to: last};
  const plot = (width, hidden) => {
    const marks = curves.filter(curve => !hidden.has(curve.name)).map(curve => ({kind: "curve", name: curve.name, colour: curve.colour, dots: curve.dots ? 3.5 : 0, wide: curve.dots ? 2 : 1.4, points: curve.dots ? curve.points : mw.smooth(curve.points, state.span)}));
    const seen = marks.flatMap(mark => mark.points.filter(([step]) => step >= state.from && step <= state.to).map(point => point[1]));
    const levels = (options.levels || []).map(level => ({kind: "rule", colour: "var(--quiet)", dash: true, ...level}));
    return {isCut: true, x: {from: state.from, to: state.to, isExact: true, isWhole: true, name: "step", show: mw.count}, marks: [...marks, ...levels.filter(level => level.y === undefined ? level.x >= state.from && level.x <= state.to : true)],
      y: mw.range([...seen, ...levels.map(level => level.y ?? null)], {name: options.unit, show: options.show}),
      tip: readings => readings.map(({curve, point}) => mw.tipLine(curve.colour, `${curve.name}, step ${point[0]}: ${options.show(point[1])}`))};
  };
  const holder = mw.chart(label, 300, plot), {item} = holder;
  const look = (from, to) => {
    const span = Math.min(last - first, Math.max((last - first) / 1000, to - from));
    state.from = Math.min(Math.max(first, from), last - span);
    state.to = state.from + span;
    ends[0].value = String(state.from);
    ends[1].value = String(state.to);
    item.draw();
  };
  const end = (name, value) => mw.el("input", {type: "range", min: String(first), max: String(last), step: "any", value: String(value), style: "width:90px", "aria-label": name, oninput: () => { const [from, to] = ends.map(input => Number(input.value)); look(Math.min(from, to), Math.max(from, to)); }});
  const ends = [end("first step that is shown", first), end("last step that is shown", last)];
  /* The wheel zooms about the pointer while Ctrl is held; without it the page scrolls. */
  item.box.addEventListener("wheel", event => {
    if (!event.ctrlKey || !item.drawn) return;
    event.preventDefault();
    const at = item.drawn.value(event.clientX - item.box.getBoundingClientRect().left), factor = event.deltaY > 0 ? 1.25 : .8;
    look(at - (at - state.from) * factor, at + (state.to - at) * factor);
  }, {passive: false});
  const smoothing = mw.el("input", {type: "range", min: "0", max: "6", value: "0", style: "width:110px", oninput: event => { state.span = 2 ** Number(event.target.value); item.draw(); }});
  holder.append(mw.el("div", {class: "row no-print"}, mw.legend(holder, curves.map(curve => curve.name), named), mw.el("label", {class: "row"}, "smoothing", smoothing), mw.el("span", {class: "row"}, mw.el("span", {class: "label"}, "steps"), ...ends)));
  return holder;
};

mw.lossChart = runs => {
  const several = runs.length > 1, colours = Object.values(mw.palette.time);
  const curves = runs.flatMap((run, index) => {
    const prefix = several ? `${run.name}: ` : "";
    return [{name: `${prefix}training`, colour: several ? colours[(2 * index) % colours.length] : mw.palette.time.attention, points: run.losses},
      ...(run.evals.length ? [{name: `${prefix}held-out`, dots: true, colour: several ? colours[(2 * index + 1) % colours.length] : mw.palette.time.ep_comm, points: run.evals.map(item => [item.step, item.heldout_loss])}] : [])];
  });
  const entropies = [...new Set(runs.flatMap(run => run.evals.map(item => item.unigram_entropy)))];
  const levels = [...entropies.map(value => ({y: value, text: `unigram entropy ${value.toFixed(3)}`})), ...(several ? [] : runs[0].resumed.map(step => ({x: step, text: "resumed"})))];
  return mw.curves("Training and held-out loss over the steps, nats a token", curves, {unit: "loss, nats a token", show: value => value === null ? "" : Number(value).toFixed(3), levels});
};
mw.stepTimes = runs => {
  const colours = Object.values(mw.palette.time);
  const curves = runs.map((run, index) => ({name: runs.length > 1 ? run.name : "step", colour: colours[index % colours.length], points: run.steps}));
  const levels = runs.length > 1 ? [] : [{y: runs[0].step_s, text: `median of steady steps ${mw.seconds(runs[0].step_s)}`}, {y: runs[0].predicted_step_s, text: `predicted ${mw.seconds(runs[0].predicted_step_s)}`}];
  return mw.curves("Seconds of every step", curves, {unit: "seconds of a step", show: mw.seconds, levels});
};

/* Two stacked bars, predicted over observed, with their table. */
mw.pairChart = (label, values, colours, show, observed) => {
  const names = values.map(value => value.name);
  const rows = [["predicted", "predicted"], ...(values.some(value => value.observed) ? [[observed, "observed"]] : [])];
  const plot = (width, hidden) => {
    const shown = values.filter(value => !hidden.has(value.name));
    const marks = mw.stacked(shown.map(value => ({colour: colours[value.name], values: rows.map(row => value[row[1]] || 0)})));
    return {marks, thick: 34, x: {...mw.range([0, ...marks.map(mark => mark.to)]), from: 0, show, isBytes: show === mw.bytes}, y: {names: rows.map(row => row[0])},
      tip: index => [mw.tipTitle(rows[index][0]), ...shown.filter(value => value[rows[index][1]]).map(value => mw.tipLine(colours[value.name], `${mw.words(value.name)}: ${show(value[rows[index][1]])}`))]};
  };
  const holder = mw.chart(label, 60 + 52 * rows.length, plot);
  holder.append(mw.legend(holder, names, colours),
    mw.table([{t: ""}, {t: "predicted", n: true}, {t: observed, n: true}], values.map(value => [mw.words(value.name), value.predicted ? show(value.predicted) : "–", value.observed ? show(value.observed) : "–"]), label));
  return holder;
};

mw.heatColour = load => {
  if (load <= 0) return mw.colour("bad");
  const level = Math.max(-1, Math.min(1, Math.log2(load)));
  return level >= 0 ? `rgba(224,123,57,${(.12 + .88 * level).toFixed(2)})` : `rgba(72,120,184,${(.12 - .88 * level).toFixed(2)})`;
};
mw.heat = (layers, key, unit) => mw.el("div", {}, mw.el("div", {class: "heat", role: "img", "aria-label": `Load of every ${unit} over its layer's mean`},
  layers.map(layer => mw.el("div", {class: "heatrow"}, mw.el("span", {class: "n"}, String(layer.layer)),
    mw.el("div", {class: "cells"}, layer[key].map((load, index) => mw.el("i", {style: `background:${mw.heatColour(load)}`, title: `layer ${layer.layer}, ${unit} ${index}: ${load.toFixed(2)} × the mean`}))),
    mw.el("b", {}, Math.max(...layer[key]).toFixed(2))))),
  mw.el("div", {class: "row copies no-print"}, mw.rowCopies(() => [["layer", ...layers[0][key].map((_, index) => `${unit} ${index}`)], ...layers.map(layer => [String(layer.layer), ...layer[key].map(load => load.toFixed(2))])], `load of every ${unit}`)));

mw.expertPanel = experts => {
  const panel = mw.panel("Expert load", mw.el("p", {class: "note"}, `${experts.window}; a row a layer, a cell an expert; blue gets less than the mean, orange more; the figure is the hottest. ${experts.dead}.`), mw.heat(experts.layers, "experts", "expert"));
  if (experts.layers[0].ranks.length > 1) panel.append(mw.el("h3", {style: "margin-top:.7rem"}, "Expert-parallel ranks"), mw.heat(experts.layers, "ranks", "EP rank"));
  const colours = Object.values(mw.palette.time);
  panel.append(mw.el("details", {}, mw.el("summary", {}, "Hottest expert over the steps, and the routers"),
    mw.curves("Load of the hottest expert of each layer over the steps", experts.layers.map((layer, index) => ({name: `layer ${layer.layer}`, colour: colours[index % colours.length], points: layer.hottest})), {unit: "hottest, × the mean", show: value => Number(value).toFixed(2)}),
    mw.documentTable(experts.routers, "Routers of every layer")));
  return panel;
};

mw.ledgerPanel = ledgers => mw.el("section", {class: "panel", id: "ledger"}, mw.el("h2", {}, "Predicted and counted"),
  ledgers.length ? mw.el("p", {class: "note"}, "States, collectives and FLOPs must be equal, saved activations within 3 % in total; all storages that live are those of the rows and what may lie beside them; listed lines promise nothing.") : mw.el("p", {class: "quiet"}, "No ledger was counted in this run."),
  ledgers.map(mw.part));

mw.render.RunView = (run, root) => {
  const section = (id, node) => { node.id = id; return node; };
  root.append(mw.el("section", {class: `panel verdict ${{good: "fits", bad: "oom"}[run.verdict.tone] || ""}`, id: "verdict"}, mw.el("p", {class: "quiet"}, run.name), mw.el("h1", {class: "sentence"}, run.verdict.sentence),
    mw.el("p", {class: "quiet"}, `${run.job.model} on ${mw.count(run.job.devices)} × ${run.job.device}, ${run.job.precision}`), mw.el("code", {class: "layout"}, run.job.layout),
    mw.el("div", {class: "tiles"}, run.verdict.tiles.map(tile => mw.el("div", {class: `tile ${tile.tone}`}, mw.el("span", {}, tile.label), mw.el("b", {}, tile.value), mw.el("small", {}, tile.note))))),
  mw.diagnosisPanels(run.diagnosis),
  section("loss", mw.panel("Loss", run.losses.length ? mw.lossChart([run]) : mw.el("p", {class: "quiet"}, "No step was recorded."))),
  section("experts", run.experts ? mw.expertPanel(run.experts) : mw.panel("Expert load", mw.el("p", {class: "quiet"}, "No expert load was recorded."))),
  section("time", mw.panel("Time of a step", mw.el("p", {class: "note"}, "A step's time is the median over steady steps, on the whole page; measured phases have their shares of it."), run.phases.length ? mw.pairChart("Phases of a step, predicted and measured", run.phases, mw.palette.phase, mw.seconds, "measured") : "", run.steps.length ? mw.stepTimes([run]) : "")),
  section("memory", mw.panel("Memory of one rank", mw.el("p", {class: "note"}, "Allowances and short-lived buffers are predicted only; the engine counts states and saved activations."), mw.pairChart("Memory by component, predicted and counted", run.memory, mw.palette.memory, mw.bytes, "counted"))),
  mw.el("section", {class: "panel", id: "plan"}, mw.el("h2", {}, "The plan"), mw.el("div", {class: "cards"}, run.facts.map(mw.part))),
  mw.ledgerPanel(run.ledgers),
  mw.el("section", {class: "panel", id: "constants"}, mw.part(run.sources)),
  mw.el("section", {class: "panel", id: "sessions"}, run.incidents.map(mw.part), mw.part(run.sessions)));
};

mw.render.RunsView = (view, root) => {
  root.append(mw.el("section", {class: "panel verdict", id: "runs"}, mw.el("h1", {}, `${view.runs.length} runs over each other`),
    mw.table([{t: "run"}, {t: "layout"}, {t: "steps", n: true}, {t: "last held-out loss", n: true}, {t: "step", n: true}, {t: "predicted", n: true}], view.runs.map(run => [run.name, mw.el("code", {}, run.job.layout), mw.count(run.steps.length ? run.steps[run.steps.length - 1][0] : 0), run.evals.length ? `${run.evals[run.evals.length - 1].heldout_loss.toFixed(4)} at step ${run.evals[run.evals.length - 1].step}` : "–", mw.seconds(run.step_s), mw.seconds(run.predicted_step_s)]), "Runs side by side")),
  mw.panel("Loss", mw.lossChart(view.runs)), mw.panel("Time of a step", mw.stepTimes(view.runs)),
  mw.panel("Phases", mw.table([{t: "phase"}, ...view.runs.map(run => ({t: run.name, n: true}))], [...new Set(view.runs.flatMap(run => run.phases.map(phase => phase.name)))].map(name => [mw.words(name), ...view.runs.map(run => { const phase = run.phases.find(item => item.name === name); return phase && phase.observed ? mw.seconds(phase.observed) : "–"; })]), "Measured phases of every run")));
};
