"use strict";
/* The record of a search: the time-memory plane with its Pareto front, and a table that sorts. */
mw.kindWords = {plan: "fits", gamble: "may not fit", candidate: "screened"};
mw.searchState = {key: "step_s", down: false, verdict: "all", grade: "all"};

mw.searchChart = (view, pick) => {
  const kinds = {plan: mw.palette.memory.communication, gamble: mw.palette.memory.activations, candidate: mw.palette.memory.fragmentation};
  const gib = 2 ** 30, held = view.ranked.map(item => item.peak_bytes / gib), capacity = view.capacity_bytes / gib;
  const front = view.ranked.filter(item => item.is_on_front).sort((a, b) => a.step_s - b.step_s);
  const plot = () => ({
    legend: [...Object.entries(kinds).map(([kind, colour]) => ({text: mw.kindWords[kind], colour})), {text: "Pareto front", colour: "var(--accent)", isLine: true}],
    x: mw.range(view.ranked.map(item => item.step_s), {name: "step, s", show: mw.digits}),
    y: mw.range([...held, capacity * 1.03], {name: "peak, GiB", show: mw.digits}),
    marks: [{kind: "rule", y: capacity, colour: "var(--bad)", wide: 2},
      {kind: "curve", points: front.map(item => [item.step_s, item.peak_bytes / gib]), step: true, dash: true, colour: "var(--accent)", isSilent: true},
      ...Object.entries(kinds).reverse().map(([kind, colour]) => ({kind: "dots", colour, r: kind === "candidate" ? 3.5 : 6.5, opacity: kind === "candidate" ? .6 : 1, points: view.ranked.filter(item => item.kind === kind).map(item => ({x: item.step_s, y: item.peak_bytes / gib, item}))}))],
    tip: item => [mw.tipTitle(item.layout), mw.el("div", {}, `${mw.seconds(item.step_s)} a step, ${mw.bytes(item.peak_bytes)}, fits with a probability of ${mw.percent(item.fit_probability, 0)}`)],
  });
  const holder = mw.chart(`${view.ranked.length} layouts by time of a step and peak memory`, 340, plot);
  if (pick) holder.item.pick = item => pick(item.layout);
  return holder;
};

mw.searchTable = (view, pick) => {
  const state = mw.searchState;
  const columns = [["layout", "layout"], ["step_s", "step", mw.seconds], ["tokens_per_s_per_device", "tok/s/dev", value => mw.digits(value)], ["mfu", "MFU", mw.percent], ["peak_bytes", "peak", mw.bytes], ["margin_bytes", "margin", mw.bytes], ["fit_probability", "odds to fit", value => mw.percent(value, 0)], ["grade", "evidence"], ["trainers", "runs in"]];
  const full = view.ranked.filter(item => item.kind !== "candidate");
  const body = mw.el("tbody", {class: "ranking"});
  const heads = columns.map(([key, title, show]) => mw.el("th", {scope: "col", class: show ? "n" : null}, mw.el("button", {type: "button", onclick: () => { state.down = state.key === key && !state.down; state.key = key; fill(); }}, title)));
  /* Cards of a phone have no heads to click. */
  const order = mw.el("select", {style: "width:auto", onchange: () => { state.key = order.value; state.down = false; fill(); }}, columns.map(([key, title]) => mw.el("option", {value: key}, title)));
  const fill = () => {
    const rows = full.filter(item => (state.verdict === "all" || item.verdict === state.verdict) && (state.grade === "all" || item.grade === state.grade));
    rows.sort((a, b) => (a[state.key] > b[state.key] ? 1 : a[state.key] < b[state.key] ? -1 : 0) * (state.down ? -1 : 1));
    heads.forEach((head, index) => { if (columns[index][0] === state.key) head.setAttribute("aria-sort", state.down ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
    order.value = state.key;
    body.replaceChildren(...rows.map(item => mw.el("tr", {class: item === full[0] ? "best" : ""}, columns.map(([key, , show]) => {
      if (key === "layout") return mw.el("td", {}, mw.layoutCell(item.layout, item.words, pick && (() => pick(item.layout))), mw.labels(item.labels));
      if (key === "grade") return mw.el("td", {"data-label": "evidence"}, mw.el("span", {class: `badge ${item.verdict}`}, item.verdict), " ", mw.gradeWords[item.grade] || item.grade);
      if (key === "trainers") return mw.el("td", {"data-label": "runs in"}, item.trainers.join(", "));
      return mw.el("td", {class: "n", "data-label": columns.find(column => column[0] === key)[1]}, show(item[key]));
    }))));
    const box = body.closest(".table-box");
    if (box) box.fit();
  };
  const choose = (key, names, label) => mw.el("label", {}, `${label} `, mw.el("select", {style: "width:auto", onchange: event => { state[key] = event.target.value; fill(); }}, names.map(name => mw.el("option", {value: name, selected: state[key] === name}, name))));
  fill();
  const table = mw.tableBox(mw.el("table", {}, mw.el("caption", {class: "visually-hidden"}, "Ranked layouts"), mw.el("thead", {}, mw.el("tr", {}, heads)), body));
  return mw.el("div", {}, mw.el("div", {class: "row no-print"}, choose("verdict", ["all", "fits", "uncertain"], "verdict"), choose("grade", ["all", "measured", "combined", "stacked", "formula"], "evidence"), mw.el("label", {}, "sorted by ", order)), table,
    mw.el("p", {class: "note no-print"}, "Words: ", columns.map(column => column[1]).filter(title => mw.terms[title.toLowerCase()]).flatMap((title, place) => [place ? ", " : "", mw.term(title)]), "."));
};

/* The fastest layout, and the fastest that somebody ran: what each adds to the other. */
mw.answerPanel = (answer, pick, more = answer.expected_step_s / answer.step_s - 1) => mw.el("section", {class: "panel", "data-answer": answer.layout},
  mw.el("h2", {}, answer.title), mw.layoutFace(answer),
  pick ? mw.el("p", {style: "margin:.5rem 0"}, mw.el("button", {type: "button", class: "small pick", onclick: () => pick(answer.layout)}, "Show this plan")) : "",
  mw.el("p", {}, `Expect ${mw.seconds(answer.expected_step_s)} a step${more ? ` (${mw.seconds(answer.step_s)} by estimate, ${mw.signed(more, mw.percent)}: picked from many)` : ""}. `, mw.el("span", {class: "badge"}, answer.runs ? `${mw.count(answer.runs)} published runs made its choices` : mw.gradeWords[answer.grade] || answer.grade)),
  answer.adds.length && !answer.runs ? mw.el("p", {class: "note"}, "Adds ", answer.adds.join(", "), ": nobody published all of them together.") : "",
  answer.published ? mw.el("p", {class: "note"}, `${answer.published}.`) : "");

mw.render.SearchView = (view, root, act, pick) => {
  root.append(mw.el("section", {class: "panel verdict fits", id: "search-answer"}, mw.el("h1", {}, view.ranked.length ? "Best layout" : "No layout fits"),
    view.answers.length ? mw.el("div", {class: "cards answers"}, view.answers.map(answer => mw.answerPanel(answer, pick))) : "",
    mw.el("ul", {class: "plain"}, view.why.map(line => mw.el("li", {}, line))),
    mw.el("p", {class: "note"}, `${mw.count(view.scored)} layouts scored. ${view.rejected.map(item => `${mw.count(item.value)} ${item.name}`).join("; ")}.`)),
  mw.panel("Time and memory", mw.el("p", {class: "note"}, "Point for a layout, click to load it; the red line is the capacity."), mw.searchChart(view, pick)),
  mw.panel("Ranking", mw.searchTable(view, pick)));
};

/* ---- nothing fits: the nearest miss, and what would fit ---- */
mw.render.Misfit = (view, root, act, pick) => {
  const button = (text, layout, devices) => pick ? mw.el("button", {type: "button", class: "small", onclick: () => pick(layout, devices)}, text) : "";
  const facts = [
    mw.el("li", {}, `The nearest layout lacks ${mw.bytes(view.short_bytes)} a device on pipeline rank ${view.peak_rank}, most of it ${view.largest}. Layouts with offload, ZeRO and recompute are among those tried. `, button("Show it", view.layout, view.devices)),
    view.enough ? mw.el("li", {"data-enough": String(view.enough)}, `${mw.count(view.enough)} × ${view.device} hold it, at ${mw.seconds(view.enough_step_s)} a step. `, button(`Plan for ${mw.count(view.enough)}`, view.enough_layout, view.enough)) : "",
    ...view.fitting.map(item => mw.el("li", {}, `With ${item.change} it fits on these devices, at ${mw.seconds(item.step_s)} a step${item.host_bytes ? ` and ${mw.bytes(item.host_bytes)} of host memory a device` : ""}: `, mw.el("code", {}, item.setting))),
    view.is_final && view.tried.length && !view.fitting.length ? mw.el("li", {}, `Not enough on these devices: ${view.tried.join(", ")}.`) : "",
    view.is_final ? "" : mw.el("li", {class: "note"}, "looking for what would fit …")];
  root.append(mw.el("section", {class: "panel verdict oom", id: "verdict", "data-misfit": view.is_final ? "final" : "first", "aria-live": "polite"},
    mw.el("h1", {}, `Nothing fits ${mw.count(view.devices)} × ${view.device}`), mw.el("ul", {class: "plain"}, facts)));
};

/* ---- layouts side by side ---- */
mw.changeSteps = (from, to, changes, colours, show, names) => {
  let at = from;
  const steps = [{label: names[0], from: 0, to: from, colour: "var(--quiet)", text: show(from)}];
  for (const change of changes.filter(item => item.value)) {
    steps.push({label: mw.words(change.name), from: at, to: at + change.value, colour: colours[change.name], text: mw.signed(change.value, show)});
    at += change.value;
  }
  steps.push({label: names[1], from: 0, to, colour: "var(--quiet)", text: show(to)});
  return steps;
};

mw.render.ComparisonView = (view, root, act, pick) => {
  const [first, ...others] = view.plans;
  const letters = "ABCD";
  root.append(mw.wide(mw.panel("Side by side", mw.table([{t: ""}, {t: "layout"}, {t: "verdict"}, {t: "step", n: true}, {t: "tok/s/dev", n: true}, {t: "MFU", n: true}, {t: "peak", n: true}, {t: "margin", n: true}],
    view.plans.map((plan, index) => [letters[index], mw.layoutCell(plan.layout, plan.words, pick && (() => pick(plan.layout))),
      plan.verdict ? mw.el("span", {class: `badge ${mw.qualityClass[plan.quality] || plan.verdict}`}, plan.headline) : mw.el("span", {class: "badge bad"}, "not legal"),
      ...(plan.verdict ? [mw.seconds(plan.step_s), mw.digits(plan.tokens_per_s_per_device), mw.percent(plan.mfu), mw.bytes(plan.peak_bytes), mw.bytes(plan.margin_bytes)] : ["", "", "", "", ""])]), "Layouts side by side"))));
  others.forEach((plan, index) => {
    const name = letters[index + 1];
    const panel = mw.panel(`${name} beside A`, mw.el("ul", {class: "plain"}, plan.lines.map(line => mw.el("li", {}, line))));
    if (plan.verdict) {
      const steps = () => mw.changeSteps(first.step_s, plan.step_s, plan.step_changes, mw.palette.time, mw.seconds, ["A", name]);
      const gib = 2 ** 30, showGib = value => mw.bytes(value * gib);
      const held = () => mw.changeSteps(first.peak_bytes / gib, plan.peak_bytes / gib, plan.memory_changes.map(item => ({...item, value: item.value / gib})), mw.palette.memory, showGib, ["A", name]);
      const shown = plan.step_changes.filter(item => item.value).length + 2, shownHeld = plan.memory_changes.filter(item => item.value).length + 2;
      panel.append(mw.el("div", {class: "cards", style: "margin-top:.6rem"},
        mw.el("div", {}, mw.el("h3", {}, "Time of a step"), mw.chart(`Change of the step from A to ${name}`, 40 + 25 * shown, () => mw.waterfall(steps(), mw.seconds))),
        mw.el("div", {}, mw.el("h3", {}, "Memory of the fullest rank"), mw.chart(`Change of the peak from A to ${name}`, 40 + 25 * shownHeld, () => mw.waterfall(held(), showGib)))),
      mw.el("details", {}, mw.el("summary", {class: "note"}, "Exact changes"),
        mw.table([{t: "part"}, {t: "seconds", n: true}], plan.step_changes.map(item => [mw.term(mw.words(item.name), `time ${item.name}`), mw.el("span", {"data-change": item.name, "data-plan": name, "data-value": String(item.value)}, String(item.value))]), "Changes of the step"),
        mw.table([{t: "component"}, {t: "bytes", n: true}], plan.memory_changes.map(item => [mw.term(mw.words(item.name), `component ${item.name}`), mw.count(item.value)]), "Changes of the peak")));
    }
    root.append(panel);
  });
};

/* ---- a budget ---- */
mw.render.BudgetView = (view, root, act, pick) => {
  const points = view.points;
  const fewest = view.fewest > 0 ? `The fewest ${view.device} that hold it: ${mw.count(view.fewest)}.` : view.fewest < 0 ? "No number of devices up to these holds it." : "Looking for the fewest devices …";
  root.append(mw.el("section", {class: "panel verdict", id: "budget-answer"}, mw.el("h1", {}, `${view.model}: ${mw.tokens(view.tokens)} tokens`),
    mw.el("p", {"data-fewest": String(view.fewest)}, fewest),
    mw.el("p", {class: "note"}, `${view.first_tokens < view.tokens_per_step ? `${mw.count(view.first_tokens)} tokens in the first step, growing to ` : ""}${mw.count(view.tokens_per_step)} tokens a step on every number of devices; days hold steps alone, without restarts and evaluations.${view.price ? ` Costs are assumed: ${view.price} an hour of a device is your price.` : ""}`)));
  if (!points.length) return;
  const curve = (days, style) => ({kind: "curve", colour: mw.palette.time.attention, points: points.map(point => [point.devices, days(point)]), ...style});
  const marks = [
    curve(point => points[0].days * points[0].devices / point.devices, {isSilent: true, wide: 1, dash: true, colour: "var(--quiet)"}),
    ...[0, 1].map(end => curve(point => point.days_80[end], {isSilent: true, wide: 1, opacity: .55})),
    curve(point => point.days, {wide: 2, dots: 4.5, text: mw.digits}),
  ];
  const plot = () => ({
    right: 44, marks,
    x: mw.range(points.map(point => point.devices), {log: 2, name: "devices", show: value => mw.count(value)}),
    y: mw.range(marks.flatMap(mark => mark.points.map(point => point[1])), {log: 2, name: "days", show: mw.digits}),
    tip: ([reading]) => {
      const point = points.find(item => item.devices === reading.point[0]);
      return [mw.tipTitle(`${mw.count(point.devices)} devices`), mw.el("div", {}, `${mw.digits(point.days)} days (80 %: ${mw.digits(point.days_80[0])} to ${mw.digits(point.days_80[1])})`), mw.el("div", {}, `${mw.seconds(point.step_s)} a step`)];
    },
  });
  root.append(mw.panel("Days by number of devices", mw.chart("Days of training by number of devices on logarithmic axes, with the interval of 80 %", 320, plot), mw.el("p", {class: "note"}, "Both axes are logarithmic. Dashed: as many device-hours as on the fewest devices; thin: 80 %.")),
    mw.panel("Figures", mw.table([{t: "devices", n: true}, {t: "layout"}, {t: "step", n: true}, {t: "steps", n: true}, {t: "days", n: true}, {t: "80 %", n: true}, {t: "device-hours", n: true}, ...(view.first_tokens < view.tokens_per_step ? [{t: "days of the ramp", n: true}] : []), ...(view.price ? [{t: "cost (assumed)", n: true}] : [])],
      points.map(point => [mw.count(point.devices), mw.layoutCell(point.layout, point.words, pick && (() => pick(point.layout, point.devices))), mw.seconds(point.step_s), mw.count(point.steps), mw.digits(point.days), `${mw.digits(point.days_80[0])} to ${mw.digits(point.days_80[1])}`, mw.count(point.device_hours), ...(view.first_tokens < view.tokens_per_step ? [mw.digits(point.ramp_days)] : []), ...(view.price ? [mw.count(point.cost)] : [])]), "Budget by number of devices"),
      view.without_layout.length ? mw.el("p", {class: "note"}, `No layout fits surely enough: ${view.without_layout.join(", ")} devices.`) : ""));
};
/* ---- a design: losses of shapes by size ---- */
mw.render.DesignView = (view, root) => {
  const roles = [["chosen", "chosen shape", mw.palette.time.experts, 16], ["front", "no shape beats it", mw.palette.time.attention, 9], ["published", "published models, trained alike", "var(--quiet)", 9]];
  const plot = () => ({
    legend: roles.map(([, text, colour]) => ({text, colour})),
    x: mw.range(view.points.map(point => point.total), {log: 10, name: "parameters", show: mw.tokens}),
    y: mw.range(view.points.map(point => point.loss), {name: "predicted loss, nats", show: value => value.toFixed(2)}),
    marks: roles.toReversed().map(([role, , colour, size]) => ({kind: "dots", colour, r: size / 2, points: view.points.filter(point => point.role === role).map(point => ({x: point.total, y: point.loss, item: point}))})),
    tip: point => [mw.tipTitle(point.name), ...[`${mw.tokens(point.total)} parameters, ${mw.tokens(point.active)} active`, `${mw.tokens(point.tokens)} tokens in ${mw.digits(point.days)} days`, `loss ${point.loss.toFixed(3)} (${point.interval.map(end => end.toFixed(3)).join(" to ")})`].map(line => mw.el("div", {}, line))],
  });
  const answer = mw.el("div");
  mw.render.Document(view.document, answer);
  const [heading, ...sections] = answer.childNodes;
  const chosen = view.points.find(point => point.role === "chosen");
  if (chosen) heading.append(mw.el("div", {class: "tiles"},
    mw.tile("Predicted loss", chosen.loss.toFixed(3), `nats; ${chosen.interval.map(end => end.toFixed(3)).join(" to ")}`), mw.tile("Parameters", mw.tokens(chosen.total), `${mw.tokens(chosen.active)} a token`),
    mw.tile("Tokens", mw.tokens(chosen.tokens), "of training"), mw.tile("Days", mw.digits(chosen.days), "steps alone")));
  root.append(heading, mw.panel("Loss by size", mw.chart("Predicted losses of shapes by their parameters, with published models trained alike", 320, plot)), ...sections);
};
mw.tokens = value => { for (const [unit, scale] of [["T", 1e12], ["B", 1e9], ["M", 1e6]]) if (value >= scale) return `${mw.digits(value / scale)}${unit}`; return mw.count(value); };
