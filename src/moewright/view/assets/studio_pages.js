"use strict";
/* The studio's pages besides Plan. Each fills the content, and may leave something to end. */
const load = (layout, devices) => studio.load(layout, devices);
/* An answer that was given up leaves no place that seems to fill itself yet. */
studio.stopWaiting = () => studio.content().querySelectorAll(".skeleton").forEach(node => node.remove());

/* Answers that grow are painted once in two seconds at most: each is a whole page. The last is painted at once. */
studio.paced = paint => {
  let timer = 0, last = -Infinity;
  return view => {
    clearTimeout(timer);
    timer = setTimeout(() => { last = performance.now(); paint(view); }, view.is_final === false ? Math.max(0, last + 2000 - performance.now()) : 0);
  };
};

studio.pages.top = () => {
  const cancel = new AbortController();
  studio.leave = () => cancel.abort();
  const state = mw.el("p", {class: "note", role: "status", id: "top-state"}, "Searching: first results come in a moment …");
  const stop = mw.el("button", {type: "button", id: "cancel-search", onclick: () => cancel.abort()}, "Cancel");
  const bar = mw.el("progress", {"aria-label": "search"});
  const head = mw.panel("", mw.el("div", {class: "row"}, state, stop), bar);
  studio.fill(head, ...mw.skeleton(180, 380, 500));
  const params = studio.job();
  params.delete("layout");
  const finish = text => { state.textContent = text; head.hidden = !text; head.classList.remove("panel"); stop.remove(); bar.remove(); studio.stopWaiting(); };
  studio.stream("/api/task/search", params, cancel.signal, view => {
    if (cancel.signal.aborted) return;
    const root = mw.el("div");
    (mw.render[view.kind])(view, root, studio.mend, load);
    studio.noteBest(params, view);
    if (view.kind === "SearchView" && view.is_final) finish("The whole space is searched.");
    else if (view.kind !== "SearchView" && view.is_final !== false) finish("");
    else state.textContent = "First results; searching the whole space …";
    document.documentElement.dataset.results = view.is_final ? "final" : "first";
    studio.fill(head, ...root.childNodes);
  }).catch(error => finish(error.name === "AbortError" ? "Cancelled." : error.message));
};

studio.pages.timetable = async () => {
  const params = studio.job();
  if (!studio.content().querySelector("#timetable")) studio.fill(mw.panel("", mw.el("p", {class: "note"}, "Simulating the timetable …")), ...mw.skeleton(90, 520));
  const record = await studio.get("/api/timetable", params);
  if (studio.page() !== "timetable" || params.toString() !== studio.job().toString()) return;
  const trace = mw.el("a", {class: "button", href: `/api/trace?${params}`, download: "timetable.json"}, "Download for Perfetto");
  studio.paint(record);
  if (record.kind === "TimetableView") studio.content().querySelector("section:last-of-type .row").append(trace);
};

studio.pages.compare = async () => {
  const others = studio.query.getAll("with");
  const fields = [0, 1, 2].map(index => mw.el("div", {}, mw.el("label", {for: `with-${index}`}, `${"BCD"[index]}: another layout`), mw.el("input", {type: "text", class: "mono", id: `with-${index}`, value: others[index] || "", placeholder: index ? "" : "tp1,ep8,mbs1"})));
  const form = mw.panel("A is the layout that is chosen; B to D stand beside it", mw.el("div", {class: "fields"}, ...fields,
    mw.el("div", {class: "row", style: "align-self:end"}, mw.el("button", {type: "button", class: "primary", id: "compare", onclick: () => studio.go({with: fields.map(field => field.querySelector("input").value.trim())})}, "Compare"),
      mw.el("button", {type: "button", onclick: () => studio.go({with: [...others, studio.query.get("layout")].slice(-3)})}, "Add A to them"))));
  if (!others.length) { studio.fill(form); return; }
  const params = studio.job();
  for (const other of others) params.append("with", other);
  studio.fill(form, mw.el("p", {class: "note"}, "comparing …"), ...mw.skeleton(170, 380));
  const record = await studio.get("/api/compare", params);
  if (studio.page() !== "compare") return;
  const root = mw.el("div");
  mw.render[record.kind](record, root, studio.mend, load);
  studio.fill(form, ...root.childNodes);
};

studio.pages.budget = () => {
  const tokens = mw.el("input", {type: "text", id: "tokens", value: studio.query.get("tokens") || "", placeholder: "1T"});
  const price = mw.el("input", {type: "text", id: "price", value: studio.query.get("price") || "", placeholder: "2.5"});
  const ramp = mw.el("input", {type: "text", id: "ramp", value: studio.query.get("rampup_batch_size") || "", placeholder: "64 64 1000000"});
  const state = mw.el("p", {class: "note", role: "status"});
  const form = mw.panel("What do so many tokens take?", mw.el("div", {class: "fields"},
    mw.el("div", {}, mw.el("label", {for: "tokens"}, "Tokens, such as 15T or 500B"), tokens), mw.el("div", {}, mw.el("label", {for: "price"}, "Your price of a device-hour (assumed)"), price),
    mw.el("div", {}, mw.el("label", {for: "ramp"}, "Batch ramp: start, increment, samples"), ramp),
    mw.el("div", {class: "row all"}, mw.el("button", {type: "button", class: "primary", id: "budget", onclick: () => studio.go({tokens: tokens.value.trim() || "1T", price: price.value.trim(), rampup_batch_size: ramp.value.trim()})}, "Work it out"), state)));
  if (!studio.query.get("tokens")) { studio.fill(form); return; }
  studio.fill(form, ...mw.skeleton(110, 380, 260));
  const cancel = new AbortController();
  studio.leave = () => cancel.abort();
  const params = studio.job();
  params.set("tokens", studio.query.get("tokens"));
  if (studio.query.get("price")) params.set("price", studio.query.get("price"));
  state.textContent = "a search for each number of devices …";
  studio.stream("/api/task/budget", params, cancel.signal, studio.paced(view => {
    if (cancel.signal.aborted) return;
    const root = mw.el("div");
    mw.render[view.kind](view, root, studio.mend, load);
    state.textContent = view.is_final || view.kind !== "BudgetView" ? "" : "a search for each number of devices …";
    studio.fill(form, ...root.childNodes);
  })).catch(error => { if (error.name !== "AbortError") { state.textContent = error.message; studio.stopWaiting(); } });
};

/* Shapes of a model: one of days, tokens and a loss is the goal; the model and devices are those of the job. */
studio.pages.design = () => {
  const goals = [["days", "Days of the training", "30"], ["tokens", "or tokens, such as 2T", ""], ["until", "or a loss in nats", ""], ["max_total", "Most parameters, such as 40B", ""], ["max_active", "Most a token activates, such as 4B", ""], ["serve", "Devices that serve it, such as 1xH200", ""], ["served_tokens", "Tokens that it serves in its life, such as 10T", ""]];
  const axes = [["attention_kinds", "Kinds of attention", "gqa mla"], ["kv_heads", "Heads of keys and values", "2 4 8"], ["vocab_sizes", "Sizes of the vocabulary", "65536 151936"], ["shared_experts", "Shared experts", "0 1 2"]];
  const fields = [...goals, ...axes];
  const inputs = Object.fromEntries(fields.map(([name, , hint]) => [name, mw.el("input", {type: "text", id: name, value: studio.query.get(name) || "", placeholder: hint})]));
  const state = mw.el("p", {class: "note", role: "status"});
  const read = () => Object.fromEntries(fields.map(([name]) => [name, inputs[name].value.trim()]));
  const start = () => { const goal = read(); studio.go(goal.days || goal.tokens || goal.until ? goal : {...goal, days: "30"}); };
  const show = ([name, title]) => mw.el("div", {}, mw.el("label", {for: name}, title), inputs[name]);
  const form = mw.panel("Which shape of model is best to train here?", mw.el("div", {class: "fields"}, goals.map(show)),
    mw.el("details", {class: "fold", open: axes.some(([name]) => studio.query.get(name)) || null}, mw.el("summary", {}, "Compare attention, vocabularies and shared experts too"),
      mw.el("p", {class: "note"}, "Each with each, besides width, depth and experts; what is left empty is the model's own."), mw.el("div", {class: "fields"}, axes.map(show))),
    mw.el("div", {class: "row all"}, mw.el("button", {type: "button", class: "primary", id: "design", onclick: start}, "Compare shapes"), state));
  if (!["days", "tokens", "until"].some(name => studio.query.get(name))) { studio.fill(form); return; }
  studio.fill(form, ...mw.skeleton(70, 380, 260));
  const cancel = new AbortController();
  studio.leave = () => cancel.abort();
  const params = studio.job();
  for (const [name] of fields) if (studio.query.get(name)) params.set(name, studio.query.get(name));
  state.textContent = "shapes in template layouts, then full searches for the front …";
  studio.stream("/api/task/design", params, cancel.signal, view => {
    if (cancel.signal.aborted) return;
    if (view.total) { state.textContent = `full plan ${view.done + 1} of at most ${view.total} …`; return; }
    const root = mw.el("div");
    mw.render[view.kind](view, root, studio.mend);
    state.textContent = "";
    studio.fill(form, ...root.childNodes);
  }).catch(error => { if (error.name !== "AbortError") { state.textContent = error.message; studio.stopWaiting(); } });
};

studio.targets = [["megatron", "Megatron-LM script"], ["bridge", "Megatron Bridge recipe"], ["torchtitan", "torchtitan configuration"], ["slurm", "Slurm script"], ["k8s", "Kubernetes TrainJob"], ["torchrun", "torchrun (our engine)"]];
studio.pages.share = async () => {
  const params = studio.job();
  const address = mw.el("input", {type: "text", readonly: true, id: "address", value: location.href.replace("/share", "/")});
  const shown = mw.el("div", {id: "export-file", "aria-live": "polite"});
  const job = mw.el("input", {type: "text", id: "export-job", placeholder: "job.toml"});
  const image = mw.el("input", {type: "text", id: "export-image", placeholder: "registry/trainer:tag"});
  const needs = {torchrun: [job, "the job file of the plan, for it starts our own engine"], k8s: [image, "the container image that holds the trainer"]};
  const show = async (target, title) => {
    const [field, need] = needs[target] || [];
    if (field && !field.value.trim()) { shown.replaceChildren(mw.el("p", {class: "error"}, `${title} needs ${need}: name it above.`)); field.focus(); return; }
    const asked = new URLSearchParams(params);
    asked.set("to", target);
    if (job.value.trim() && ["torchrun", "slurm", "k8s"].includes(target)) asked.set("job", job.value.trim());
    if (target === "k8s") asked.set("image", image.value.trim());
    const record = await studio.get("/api/export", asked);
    if (record.reasons) { shown.replaceChildren(mw.el("p", {class: "error"}, record.reasons.map(reason => reason.text).join("; "))); return; }
    const {text} = record;
    shown.replaceChildren(mw.el("div", {class: "row"}, mw.el("b", {}, title), mw.el("button", {type: "button", class: "small", onclick: () => navigator.clipboard.writeText(text)}, "Copy"), mw.el("button", {type: "button", class: "small", onclick: () => mw.save(`${target}.${{bridge: "py", torchtitan: "py", k8s: "yaml"}[target] || "sh"}`, text, "text/plain")}, "Download")), mw.el("pre", {class: "file", tabindex: "0"}, text));
  };
  studio.fill(
    mw.panel("Share this layout", mw.el("label", {for: "address"}, /^[/~.]|[.](json|toml)$/.test(params.get("model") || "") ? "This address names a file of this machine: send plan.json, which another studio takes where it is dropped" : "The address holds the whole state: open it in any studio"), mw.el("div", {class: "row"}, address, mw.el("button", {type: "button", onclick: () => { address.select(); navigator.clipboard.writeText(address.value); }}, "Copy")),
      mw.el("div", {class: "row", style: "margin-top:.8rem"}, mw.el("a", {class: "button", id: "get-page", href: `/api/page?${params}`, download: "plan.html"}, "One offline page (HTML)"), mw.el("a", {class: "button", id: "get-plan", href: `/api/plan.json?${params}`, download: "plan.json"}, "plan.json"), mw.el("a", {class: "button", id: "get-card", href: `/api/card.svg?${params}`, download: "plan.svg"}, "Card for a README (SVG)"), mw.el("a", {class: "button", href: `/api/trace?${params}`, download: "timetable.json"}, "Timetable for Perfetto"))),
    mw.panel("Launch files", mw.el("div", {class: "row"}, ...studio.targets.map(([target, title]) => mw.el("button", {type: "button", "data-target": target, onclick: () => show(target, title)}, title))), mw.el("div", {class: "fields", style: "margin-top:.6rem"}, mw.el("div", {}, mw.el("label", {for: "export-job"}, "Job file: torchrun needs it; Slurm and Kubernetes start our engine with it, Megatron-LM without"), job), mw.el("div", {}, mw.el("label", {for: "export-image"}, "Container image: Kubernetes needs it"), image)), shown),
    mw.panel("Pictures", mw.el("p", {class: "note"}, "The two charts of the page Plan as they stand."), mw.el("div", {class: "row"}, ...[["memory", "memoryChart"], ["step", "stepChart"]].flatMap(([name, build]) => ["png", "svg"].map(kind => mw.el("button", {type: "button", "data-picture": `${name}.${kind}`, onclick: () => studio.picture(name, build, kind)}, `${name}.${kind}`))))));
};
/* A chart without a page: drawn at 1000 points, on the background of a card. */
studio.picture = async (name, build, kind) => {
  const record = await studio.get("/api/plan", studio.job());
  if (record.kind !== "PlanView") { studio.paint(record); return; }
  const {item} = mw[build](record), {drawing} = mw.drawPlot(item.plot(1000, item.hidden), 1000, 420);
  const box = mw.el("div", {class: "chart", style: "width:1000px;height:420px;position:absolute;left:-9999px"}, drawing);
  document.body.append(box);
  drawing.prepend(mw.svg("rect", {width: 1000, height: 420, fill: "var(--card)"}));
  if (kind === "svg") mw.save(`${name}.svg`, mw.standAlone(drawing), "image/svg+xml");
  else mw.save(`${name}.png`, await mw.paintDrawing(drawing));
  box.remove();
};
