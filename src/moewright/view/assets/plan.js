"use strict";
/* The record of a plan: verdict, figures, memory of every stage, the step part by part. */
mw.verdictWords = {fits: "Fits", uncertain: "May not fit", oom: "Does not fit"};
mw.gradeWords = {measured: "measured", combined: "pairs measured", stacked: "parts measured", formula: "partly formula"};

mw.figures = plan => {
  const [low, high] = plan.step_interval_80;
  return mw.el("div", {class: "tiles"},
    mw.tile("Step", mw.seconds(plan.step_s), `80 %: ${mw.seconds(low)} to ${mw.seconds(high)}`, "step_s", plan.step_s),
    mw.tile("Tokens/s a device", mw.digits(plan.tokens_per_s_per_device), `${mw.digits(plan.tflops_per_device)} TFLOP/s`, "tokens_per_s_per_device", plan.tokens_per_s_per_device),
    mw.tile("MFU", mw.percent(plan.mfu), `HFU ${mw.percent(plan.hfu)}`, "mfu", plan.mfu),
    mw.tile("Peak memory", mw.bytes(plan.peak_bytes), `of ${mw.bytes(plan.capacity_bytes)}, ±\u00a0${mw.bytes(plan.peak_sd_bytes).replace(" ", "\u00a0")}`, "peak_bytes", plan.peak_bytes),
    mw.tile("Margin", mw.bytes(plan.margin_bytes), `fits with a probability of ${mw.percent(plan.fit_probability, 0)}`, "margin_bytes", plan.margin_bytes),
    mw.tile("Bubble", mw.percent(plan.bubble_fraction, 2), `${mw.count(plan.micro_batches)} micro-batches`, "bubble_fraction", plan.bubble_fraction));
};

/* What a layout is judged by stands under its headline; `load` shows another layout. */
mw.qualityClass = {good: "fits", slow: "uncertain", uncertain: "uncertain", oom: "oom", unjudged: ""};
mw.judgementLines = (judgement, load) => [
  mw.el("p", {}, judgement.speed || (judgement.quality === "unjudged" && load !== null ? "Looking for the best layout beside it …" : ""), " ",
    load && judgement.change_layout ? mw.el("button", {type: "button", class: "small", id: "load-change", onclick: () => load(judgement.change_layout)}, "Make that change") : "", " ",
    load && judgement.best && judgement.times_best > 1.001 ? mw.el("button", {type: "button", class: "small", id: "load-best", onclick: () => load(judgement.best)}, "Show the best") : ""),
  judgement.measured ? mw.el("p", {class: "note"}, judgement.measured) : ""];
mw.showJudgement = (judgement, load) => {
  const panel = document.getElementById("verdict");
  panel.className = `panel verdict ${mw.qualityClass[judgement.quality]}`;
  panel.dataset.quality = judgement.quality;
  panel.querySelector("h1").textContent = judgement.headline;
  document.getElementById("judgement").replaceChildren(...mw.judgementLines(judgement, load));
};

/* Ranks as squares: a row a pipeline stage, a block an expert group, a shade a tensor group, a line a node. */
mw.gridDrawing = shown => {
  const {stages, ranks, ep, tp, node} = shown.grid;
  const rows = Math.min(stages, 8), columns = Math.min(ranks, 32), size = 13, step = 15;
  const svg = (tag, attributes) => { const item = document.createElementNS("http://www.w3.org/2000/svg", tag); for (const [name, value] of Object.entries(attributes)) item.setAttribute(name, value); return item; };
  const at = rank => rank * step + 7 * Math.floor(rank / ep);
  const width = at(columns - 1) + size + 2, height = rows * 23;
  const drawing = svg("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "grid", "aria-label": `the ranks of the layout: ${shown.words}`});
  for (let stage = 0; stage < rows; stage += 1)
    for (let rank = 0; rank < columns; rank += 1) {
      drawing.append(svg("rect", {x: at(rank), y: stage * 23, width: size, height: size, rx: 2, fill: "var(--accent)", opacity: tp > 1 && Math.floor(rank / tp) % 2 ? .45 : .8}));
      const place = stage * ranks + rank, next = place + 1, joined = rank + 1 < columns && Math.floor(place / node) === Math.floor(next / node);
      drawing.append(svg("rect", {x: at(rank), y: stage * 23 + 16, width: joined ? at(rank + 1) - at(rank) : size, height: 2, fill: "var(--quiet)"}));
    }
  const more = [stages > rows ? `${mw.count(stages - rows)} more stages` : "", ranks > columns ? `${mw.count(ranks - columns)} more ranks a stage` : ""].filter(Boolean).join(", ");
  return mw.el("figure", {class: "grid"}, drawing, mw.el("figcaption", {class: "note"}, mw.el("span", {}, `${stages > 1 ? "A row is a pipeline stage, a" : "A"} block ${ep > 1 ? "the ranks that share the experts" : "a rank"}, a line a node${tp > 1 ? ", a shade a tensor group" : ""}${more ? `; ${more}` : ""}.`), mw.pngButton(`the ranks of ${shown.layout}`, () => mw.paintDrawing(drawing))));
};

/* A layout: in words, as labels, as its ranks, and as text to copy. */
mw.labels = labels => labels.length ? mw.el("div", {class: "row labels"}, labels.map(label => mw.el("span", {class: "badge"}, mw.term(label)))) : "";
mw.layoutFace = (shown, id) => [mw.el("p", {class: "words"}, shown.words), mw.labels(shown.labels), mw.gridDrawing(shown),
  mw.el("div", {class: "row layout"}, mw.el("code", {id}, shown.layout), mw.copyButton(shown.layout, "the layout's text"))];

mw.verdictPanel = (plan, act) => mw.el("section", {class: `panel verdict ${mw.qualityClass[plan.judgement.quality]}`, id: "verdict", "data-quality": plan.judgement.quality, "aria-live": "polite"},
  mw.el("h1", {}, plan.headline),
  mw.el("div", {id: "judgement"}, ...mw.judgementLines(plan.judgement, act ? undefined : null)),
  mw.el("p", {}, `${plan.sentence}.`),
  mw.el("p", {class: "quiet"}, `${plan.job.model} on ${mw.count(plan.job.devices)} × ${plan.job.device}, sequence ${mw.count(plan.job.seq_len)}, global batch ${mw.count(plan.job.global_batch)}, ${plan.job.precision}`),
  plan.notes.length ? mw.el("p", {class: "note"}, plan.notes.join("; ")) : "",
  mw.layoutFace(plan.job, "layout-text"),
  mw.figures(plan));


mw.memoryChart = plan => {
  const gib = 2 ** 30, colours = mw.palette.memory;
  const names = Object.keys(colours).filter(name => plan.stages.some(stage => stage.components.some(part => part.name === name)));
  const peakOf = (stage, name) => (stage.components.find(part => part.name === name) || {value: 0}).value / gib;
  const capacity = plan.capacity_bytes / gib, spread = plan.peak_sd_bytes / gib;
  const top = Math.max(capacity + spread, ...plan.stages.map(stage => stage.peak_bytes / gib)) * 1.06;
  const plot = (width, hidden) => ({
    x: {names: plan.stages.map(stage => String(stage.pp_rank)), name: "pipeline rank"},
    y: {from: 0, to: top, name: "GiB", show: mw.digits},
    marks: [{kind: "band", from: capacity - spread, to: capacity + spread, colour: "var(--bad)"},
      ...mw.stacked(names.filter(name => !hidden.has(name)).map(name => ({colour: colours[name], values: plan.stages.map(stage => peakOf(stage, name))}))),
      {kind: "rule", y: capacity, colour: "var(--bad)", wide: 2}],
    thick: 72,
    tip: index => {
      const stage = plan.stages[index];
      return [mw.tipTitle(`rank ${stage.pp_rank}: ${mw.bytes(stage.peak_bytes)}`), mw.el("div", {}, stage.holds), ...stage.components.map(part => mw.tipLine(colours[part.name], `${mw.words(part.name)}: ${mw.bytes(part.value)}`)).reverse()];
    },
  });
  const holder = mw.chart(`Memory of ${plan.stages.length} pipeline ranks by component; the fullest holds ${mw.bytes(plan.peak_bytes)} of ${mw.bytes(plan.capacity_bytes)}`, 330, plot);
  holder.append(mw.el("p", {class: "note"}, mw.el("i", {class: "swatch", style: "background:var(--bad);height:3px;vertical-align:middle"}), ` capacity ${mw.bytes(plan.capacity_bytes)}; a peak inside the band (± ${mw.bytes(plan.peak_sd_bytes)}) is uncertain`));
  holder.append(mw.legend(holder, names, colours));
  const table = mw.table([{t: "rank"}, {t: "holds"}, ...names.map(name => ({t: mw.words(name), key: `component ${name}`, n: true})), {t: "peak, bytes", key: "peak", n: true}],
    plan.stages.map(stage => [String(stage.pp_rank), stage.holds,
      ...names.map(name => mw.count((stage.components.find(part => part.name === name) || {value: 0}).value)),
      mw.el("span", {"data-stage": stage.pp_rank, "data-value": String(stage.peak_bytes)}, mw.count(stage.peak_bytes))]), "Bytes of every pipeline rank");
  holder.append(mw.el("details", {}, mw.el("summary", {class: "note"}, "Exact bytes"), table));
  return holder;
};

mw.stepSteps = plan => {
  const shown = plan.parts.filter(part => part.seconds > 0);
  let at = 0;
  const steps = shown.map(part => {
    const step = {label: mw.words(part.part), from: at, to: at + part.seconds, colour: mw.palette.time[part.part],
      text: `${mw.seconds(part.seconds)} ${mw.percent(part.seconds / plan.step_s, part.seconds / plan.step_s < .01 ? 1 : 0)}`,
      tip: `${mw.seconds(part.seconds)} exposed${part.hidden_s > 0 ? `, ${mw.seconds(part.hidden_s)} hidden under other work` : ""}`};
    at += part.seconds;
    return step;
  });
  steps.push({label: "step", from: 0, to: plan.step_s, colour: "var(--quiet)", text: mw.seconds(plan.step_s)});
  return steps;
};

mw.stepChart = plan => {
  const rows = plan.parts.filter(part => part.seconds > 0).length + 1;
  const holder = mw.chart(`Time of a step by part; ${mw.seconds(plan.step_s)} in all`, 40 + 25 * rows, () => mw.waterfall(mw.stepSteps(plan), mw.seconds));
  const table = mw.table([{t: "part"}, {t: "exposed, s", n: true}, {t: "hidden, s", n: true}],
    plan.parts.map(part => [mw.term(mw.words(part.part), `time ${part.part}`), mw.el("span", {"data-part": part.part, "data-value": String(part.seconds)}, String(part.seconds)), String(part.hidden_s)]), "Seconds of every part of the step");
  holder.append(mw.el("details", {}, mw.el("summary", {class: "note"}, "Exact seconds"), table));
  return holder;
};

mw.evidencePanel = plan => mw.wide(mw.panel("How sure",
  mw.el("p", {}, mw.el("span", {class: "badge"}, mw.gradeWords[plan.grade] || plan.grade), ` ${plan.evidence}.`),
  mw.el("p", {class: "note"}, `Constants and rates: ${plan.sources.map(source => `${source.value} ${source.name}`).join(", ")}.`),
  plan.load_limit > 1 ? mw.el("p", {class: "note"}, `Memory is full when the busiest expert-parallel rank gets ${plan.load_limit.toFixed(2)} × its even share of tokens.`) : "",
  plan.imbalance.even_step_s > 0 ? mw.el("p", {class: "note"}, `The router decides: the busiest expert-parallel rank is taken at ${plan.imbalance.load.toFixed(2)} × its even share in steps, ${plan.imbalance.peak_load.toFixed(2)} × in peaks. Imbalance costs ${mw.percent(plan.imbalance.cost)} of an even step; in 1 run of 10 a step takes more than ${mw.seconds(plan.imbalance.step_p90_s)}.`) : "",
  mw.el("h3", {style: "margin-top:.7rem"}, "Nearest published measurements"),
  mw.table([{t: "run"}, {t: "differs in"}, {t: "measured", n: true}, {t: "predicted", n: true}, {t: "error", n: true}],
    plan.nearest_runs.map(run => [mw.el("div", {}, `${run.model.split("/").pop()}, ${run.devices} × ${run.device}`, mw.el("div", {class: "note mono"}, run.layout)), run.differs || "nothing that is compared", mw.count(run.measured), mw.count(run.predicted), mw.signed(run.error, mw.percent)]),
    "Published runs that are most like this job, in tokens/s a device"),
  mw.el("p", {class: "note"}, "Tokens/s a device; each predicted by constants that were fitted without its publisher.")));

mw.render.PlanView = (plan, root, act) => {
  root.append(mw.verdictPanel(plan, act),
    mw.el("div", {class: "cards"},
      mw.panel("Memory of every pipeline rank", mw.memoryChart(plan)),
      mw.panel("Where the step goes", mw.stepChart(plan)),
      mw.evidencePanel(plan)));
};

/* The values that a rule names as nearest: numbers, names, or a string of stages in quotes. */
mw.nearest = reason => {
  const stages = /'([^']+)'/.exec(reason.nearest);
  const plain = reason.nearest.replace(/,? or .*'.*'.*/, "").split(/,? or |, /).filter(value => /^[\w.+/-]+$/.test(value));
  return stages ? [...plain, `layout='${stages[1]}'`] : plain;
};
mw.render.RefusalView = (refusal, root, act) => {
  root.append(mw.el("section", {class: "panel verdict refused", id: "verdict", "aria-live": "polite"},
    mw.el("h1", {}, "This cannot be done"),
    mw.el("ul", {class: "plain"}, refusal.reasons.map(reason => mw.el("li", {}, mw.el("b", {}, reason.value ? `${reason.field} = ${reason.value}` : reason.field), `: ${reason.rule} `,
      ...mw.nearest(reason).map(value => act ? act(reason, value) : value))))));
};
