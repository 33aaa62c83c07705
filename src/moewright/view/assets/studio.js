"use strict";
/* The studio: the address is the state, the server computes, the newest answer alone is painted. */
const studio = {pages: {}, query: new URLSearchParams(location.search), sequence: 0, catalogue: null, record: null};
const KEYS = ["model", "on", "seq_len", "global_batch", "precision", "network", "rampup_batch_size", "layout"];
const START = {model: "Qwen/Qwen3-30B-A3B", on: "16xH100", seq_len: "4096", global_batch: "512", precision: "bf16"};

studio.page = () => location.pathname.slice(1) || "plan";
studio.address = (changes = {}, page) => {
  const params = new URLSearchParams(studio.query);
  for (const [key, value] of Object.entries(changes)) {
    params.delete(key);
    for (const item of [value].flat()) if (item !== "" && item !== null && item !== undefined) params.append(key, item);
  }
  const path = page === undefined ? location.pathname : page === "plan" ? "/" : `/${page}`;
  return [path, params];
};
/* `replace` keeps one entry of the history while a key is held. */
studio.go = (changes = {}, page, replace) => {
  const [path, params] = studio.address(changes, page);
  const address = `${path}?${params.toString().replaceAll("%2C", ",").replaceAll("%2F", "/").replaceAll("%3D", "=").replaceAll("+", "%20")}`;
  history[replace ? "replaceState" : "pushState"](null, "", address);
  studio.query = new URLSearchParams(location.search);
  studio.show();
};
addEventListener("popstate", () => { studio.query = new URLSearchParams(location.search); studio.show(); });

studio.job = () => {
  const params = new URLSearchParams();
  for (const key of KEYS) if (studio.query.get(key)) params.set(key, studio.query.get(key));
  return params;
};
studio.get = async (path, params, signal) => {
  const answer = await fetch(`${path}?${params}`, {signal});
  return answer.json();
};
studio.post = async (path, body, params) => {
  const answer = await fetch(`${path}?${params || ""}`, {method: "POST", body});
  return answer.json();
};
/* Lines of a long answer, one record each; `signal` cancels it, and the server ends its worker. */
studio.stream = async (path, params, signal, take) => {
  const answer = await fetch(`${path}?${params}`, {signal});
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) break;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) take(JSON.parse(line));
  }
};

studio.content = () => document.getElementById("content");
studio.fill = (...children) => {
  const content = studio.content(), title = document.querySelector("header.top nav a[aria-current]");
  content.replaceChildren(...children);
  mw.settle(content, title ? title.textContent : "studio");
};
studio.paint = (record, ...before) => {
  const root = mw.el("div");
  (mw.render[record.kind] || mw.render.RefusalView)(record, root, studio.mend, studio.load);
  studio.fill(...before, ...root.childNodes);
};
studio.mend = (reason, value) => mw.el("button", {type: "button", class: "small", onclick: () => studio.applyMend(reason.key, value)}, `Use ${value}`);
studio.applyMend = (key, value) => {
  if (value.startsWith("layout=")) studio.go({layout: studio.withKey(key, value)});
  else if (KEYS.includes(key)) studio.go({[key]: value});
  else {
    const control = studio.record && studio.record.controls.find(item => item.key === key);
    const step = control && control.steps.find(item => item.value === value);
    if (step) studio.go({layout: step.layout});
    else if (/^[a-z_]+$/.test(key)) studio.go({layout: studio.withKey(key, value)});
  }
};
/* Shows a layout on the plan's page, on another number of the same devices if need be. */
studio.load = (layout, devices) => studio.go(devices ? {layout, on: `${devices}x${(studio.query.get("on") || "").replace(/^\d+\s*x\s*/i, "")}`} : {layout}, "plan");
studio.withKey = (key, value) => {
  if (value.startsWith("layout=")) { const rest = (studio.query.get("layout") || "").replace(/,?layout='[^']*'/, ""); return `${rest},${value}`; }
  const joined = /^\d+$/.test(value) ? `${key}${value}` : `${key}=${value}`;
  const parts = (studio.query.get("layout") || "").split(",").filter(part => part && !new RegExp(`^${key}(=|\\d)`).test(part));
  return [...parts, joined].join(",");
};

/* ---- the form of the job ---- */
const field = (key, label, input, all, unit) => mw.el("div", {class: all ? "all" : "", title: unit}, mw.el("label", {for: `in-${key}`}, mw.term(label)), input);
const input = (key, extra) => mw.el("input", {type: "text", id: `in-${key}`, name: key, autocomplete: "off", spellcheck: "false", ...extra, onchange: event => studio.go({[key]: event.target.value.trim()})});

studio.buildForm = () => {
  const {models, devices, precisions} = studio.catalogue;
  const on = mw.el("select", {id: "in-device", "aria-label": "device", onchange: () => studio.setHardware()}, devices.map(name => mw.el("option", {value: name}, name)));
  return mw.el("div", {},
    mw.el("div", {class: "fields"},
      field("model", "Model", input("model", {list: "models", placeholder: "a name, an id of the hub, a config.json"}), true),
      mw.el("datalist", {id: "models"}, models.map(name => mw.el("option", {value: name}))),
      mw.el("div", {}, mw.el("label", {for: "in-devices"}, "Devices"), mw.el("input", {type: "number", id: "in-devices", min: "1", max: "1048576", onchange: () => studio.setHardware()})),
      mw.el("div", {}, mw.el("label", {for: "in-device"}, "of"), on),
      field("global_batch", "Global batch", input("global_batch"), false, "sequences a step"),
      field("seq_len", "Sequence", input("seq_len"), false, "tokens"),
      field("precision", "Precision", mw.el("select", {id: "in-precision", onchange: event => studio.go({precision: event.target.value})}, precisions.map(name => mw.el("option", {value: name}, name)))),
      field("network", "Network", mw.el("select", {id: "in-network", onchange: event => studio.go({network: event.target.value})}, ["", "ib", "roce", "efa", "tcp", "nvl72", "pcie"].map(name => mw.el("option", {value: name}, name || "its own")))),
      field("layout", "Layout", input("layout", {class: "mono"}), true)),
    mw.el("div", {class: "row"},
      mw.el("button", {type: "button", class: "primary", id: "find-best", onclick: () => studio.findBest()}, "Find the best layout"),
      mw.el("span", {class: "note", id: "search-state", role: "status"})),
    mw.el("div", {id: "layout-controls"}),
    mw.el("details", {class: "group"}, mw.el("summary", {}, "Bring a config.json, a plan.json or a script"), studio.buildDrop()));
};

studio.setHardware = () => studio.go({on: `${document.getElementById("in-devices").value || 1}x${document.getElementById("in-device").value}`});

studio.buildDrop = () => {
  const state = mw.el("p", {class: "note", role: "status", id: "drop-state"});
  const say = text => { state.textContent = text; };
  const area = mw.el("textarea", {id: "script", rows: "4", class: "mono", placeholder: "torchrun … pretrain_gpt.py --tensor-model-parallel-size 2 …", "aria-label": "Megatron-LM launch script"});
  const takeScript = async (text, name = "script.sh") => {
    say("reading …");
    const params = new URLSearchParams({on: studio.query.get("on") || "", model: "", name});
    const answer = await studio.post("/api/script", text, params);
    if (answer.reasons) { say(answer.reasons.map(reason => reason.text).join("; ")); return; }
    say(answer.notes.length ? answer.notes.join("; ") : "read without a remark");
    studio.go({seq_len: "", global_batch: "", precision: "", network: "", rampup_batch_size: "", ...answer.query}, "plan");
  };
  const takeFile = async file => {
    const text = await file.text();
    if (!/\.json$/i.test(file.name)) { area.value = text; await takeScript(text, file.name); return; }
    say("reading …");
    const answer = await studio.post("/api/model", text, new URLSearchParams({name: file.name}));
    const ok = !answer.reasons;
    say(ok ? [`${file.name} is read`, ...answer.notes].join("; ") : answer.reasons.map(reason => reason.text).join("; "));
    if (ok) studio.go({layout: "", ...answer.query});
  };
  const drop = mw.el("div", {class: "drop"},
    mw.el("label", {for: "file"}, "Drop a file here, or choose one: "), mw.el("input", {type: "file", id: "file", accept: ".json,.sh,.txt,.bash", onchange: event => event.target.files[0] && takeFile(event.target.files[0])}),
    mw.el("div", {style: "margin:.5rem 0 .3rem"}, area),
    mw.el("button", {type: "button", onclick: () => takeScript(area.value)}, "Take the script's layout"), state);
  drop.addEventListener("dragover", event => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", event => { event.preventDefault(); drop.classList.remove("over"); if (event.dataTransfer.files[0]) takeFile(event.dataTransfer.files[0]); });
  return drop;
};

studio.fillForm = () => {
  for (const key of ["model", "global_batch", "seq_len", "precision", "network", "layout"]) {
    const node = document.getElementById(`in-${key}`);
    const value = studio.query.get(key) || "";
    /* A job that the address holds is shown by the name of its model. */
    if (node && node !== document.activeElement) node.value = key === "model" ? value.replace(/^([\w.-]+)~[\w~-]+$/, "$1") : value;
  }
  const match = /^(\d+)\s*x\s*(.+)$/i.exec(studio.query.get("on") || "");
  if (match) {
    document.getElementById("in-devices").value = match[1];
    const select = document.getElementById("in-device");
    const name = match[2].toLowerCase();
    const option = [...select.options].find(item => item.value.toLowerCase() === name) || [...select.options].find(item => item.value.toLowerCase().startsWith(name));
    if (option) select.value = option.value;
    else { select.append(mw.el("option", {value: match[2]}, match[2])); select.value = match[2]; }
  }
};

/* What the address leaves open is shown as the planner took it. */
studio.showDefaults = job => {
  for (const key of ["global_batch", "seq_len"]) document.getElementById(`in-${key}`).placeholder = String(job[key]);
  if (!studio.query.get("precision")) document.getElementById("in-precision").value = job.precision;
};

/* ---- the controls of the layout ---- */
studio.fillControls = controls => {
  const root = document.getElementById("layout-controls");
  if (!controls || !controls.length) return;
  const old = new Map([...root.querySelectorAll("[data-key]")].map(node => [node.dataset.key, node]));
  const nodes = controls.map(control => {
    let node = old.get(control.key);
    if (!node || node.dataset.steps !== control.steps.map(step => step.value).join()) node = studio.buildControl(control);
    studio.updateControl(node, control);
    return node;
  });
  if (nodes.some((node, index) => root.children[index] !== node) || root.children.length !== nodes.length) root.replaceChildren(...nodes);
};

studio.buildControl = control => {
  const node = mw.el("div", {class: "control group", "data-key": control.key, "data-steps": control.steps.map(step => step.value).join()});
  const output = mw.el("output", {for: `c-${control.key}`});
  const name = mw.el("div", {class: "name"}, mw.el("label", {for: `c-${control.key}`, id: `l-${control.key}`}, mw.term(control.label, control.key)), output);
  node.append(name);
  name.firstChild.removeAttribute("for");
  const isSet = control.kind === "set";
  const chips = mw.el("div", {class: "chips", role: isSet ? "group" : "radiogroup", id: `c-${control.key}`, "aria-labelledby": `l-${control.key}`},
    control.steps.map((step, index) => mw.el("button", {type: "button", class: "chip", role: isSet ? null : "radio", onclick: () => studio.choose(node, index)}, mw.words(step.value))));
  /* Arrows step through the values, legal or not, as they do through radio buttons. */
  if (!isSet) chips.addEventListener("keydown", event => {
    const way = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    const index = node.control.steps.findIndex(step => step.value === node.control.value) + (way || 0);
    if (!way || !node.control.steps[index]) return;
    event.preventDefault();
    chips.children[index].focus();
    studio.choose(node, index, event.repeat);
  });
  node.append(chips);
  node.append(mw.el("div", {class: "rule", role: "status"}));
  return node;
};

studio.updateControl = (node, control) => {
  node.control = control;
  const index = control.steps.findIndex(step => step.value === control.value);
  const chosen = control.kind === "set" ? control.value.split("+") : [control.value];
  node.querySelector("output").textContent = control.kind === "set" ? "" : control.value;
  [...node.querySelectorAll(".chip")].forEach((chip, at) => {
    const step = control.steps[at], isChosen = chosen.includes(step.value);
    chip.setAttribute(control.kind === "set" ? "aria-pressed" : "aria-checked", String(isChosen));
    if (control.kind !== "set") chip.tabIndex = isChosen || (index < 0 && !at) ? 0 : -1;
    chip.classList.toggle("illegal", Boolean(step.rule) && !isChosen);
    chip.title = step.rule || (mw.terms[`${control.key}=${step.value}`] || mw.terms[step.value] || {meaning: ""}).meaning;
  });
  const broken = control.rule ? control : studio.brokenBy(control);
  const near = broken && broken.nearest;
  node.querySelector(".rule").replaceChildren(...broken ? [mw.el("span", {}, broken.rule), near ? mw.el("button", {type: "button", class: "small nearest", onclick: () => studio.go({layout: near.layout})}, near.value ? `Use ${control.key} ${near.value}` : "Take it back") : ""] : []);
};
/* A choice may break the rule of another key: it is said where the choice was made, with the nearest value that was legal
   then, as long as the address has what was chosen. */
studio.brokenBy = control => studio.hand && studio.hand.key === control.key && studio.hand.layout === studio.query.get("layout") ? studio.hand : null;
studio.noteHand = (control, index) => {
  const step = control.steps[index], far = place => Math.abs(place - index);
  const legal = [...control.steps.keys()].filter(place => !control.steps[place].rule);
  const near = control.kind === "set" || !legal.length ? {value: "", layout: studio.query.get("layout")} : control.steps[legal.reduce((best, place) => far(place) < far(best) ? place : best)];
  studio.hand = step.rule ? {key: control.key, layout: step.layout, rule: step.rule, nearest: near} : null;
};

/* Each choice can be taken back by the browser's own button; a key that is held makes one entry. */
studio.choose = (node, index, isHeld) => {
  const step = node.control.steps[index];
  studio.noteHand(node.control, index);
  studio.go({layout: step.layout}, undefined, isHeld);
};

/* ---- asking and painting ---- */
/* One question is under way at a time; while it runs, only the newest next one is kept. */
studio.ask = async () => {
  studio.sequence += 1;
  studio.wanted = studio.sequence;
  if (studio.asking) return;
  studio.asking = true;
  try {
    while (studio.wanted !== studio.answered) {
      const asked = studio.wanted;
      const params = studio.job();
      const record = await studio.get("/api/plan", params);
      studio.answered = asked;
      if (asked === studio.wanted) studio.take(record, params);
    }
  } catch (error) {
    studio.fill(mw.panel("The studio does not answer", mw.el("p", {class: "error"}, String(error.message))));
    studio.answered = studio.wanted;
  } finally { studio.asking = false; }
};
/* What is illegal is said above the last layout that was not, whose figures stay. */
studio.paintPlan = record => {
  const content = studio.content(), figures = content.querySelector(".cards");
  if (record.kind === "PlanView" || !figures || !record.controls || !record.controls.length) { studio.paint(record); return; }
  const root = mw.el("div");
  mw.render.RefusalView(record, root, studio.mend);
  root.append(mw.el("p", {class: "note"}, "The figures below are those of the last legal layout."));
  content.querySelectorAll(":scope > :not(.cards)").forEach(node => node.remove());
  content.prepend(...root.childNodes);
  figures.classList.add("stale");
};
studio.take = (record, params) => {
  studio.record = record;
  studio.fillControls(record.controls);
  if (record.job) studio.showDefaults(record.job);
  document.documentElement.dataset.painted = params.toString();
  if (studio.page() === "plan") { studio.paintPlan(record); studio.judge(); studio.askWhatIf(); }
  document.title = record.job ? `${record.job.layout} · moewright` : "moewright studio";
  requestAnimationFrame(() => { document.documentElement.dataset.frame = String(studio.answered); });
};

studio.findBest = async () => {
  if (studio.search) { studio.search.abort(); return; }
  const button = document.getElementById("find-best"), state = document.getElementById("search-state");
  studio.search = new AbortController();
  button.textContent = "Cancel the search";
  state.textContent = "searching …";
  try {
    const params = studio.job();
    params.delete("layout");
    await studio.stream("/api/task/search", params, studio.search.signal, view => {
      if (view.kind !== "SearchView") {
        state.textContent = view.reasons ? view.reasons[0].text : "nothing fits";
        studio.noteBest(params, view);
        if (!studio.query.get("layout") && studio.page() === "plan") studio.paint(view);
        return;
      }
      state.textContent = view.is_final ? `best of ${mw.count(view.scored)} layouts` : "first result; searching on …";
      studio.noteBest(params, view);
      studio.go({layout: view.ranked[0].layout}, undefined, !view.is_final);
    });
  } catch (error) {
    state.textContent = error.name === "AbortError" ? "cancelled" : String(error.message);
  } finally {
    studio.search = null;
    button.textContent = "Find the best layout";
  }
};

studio.show = () => {
  const page = studio.page();
  for (const link of document.querySelectorAll("header.top nav a")) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const needsForm = page !== "runs" && page !== "watch";
  document.querySelector(".frame").classList.toggle("wide", !needsForm);
  document.querySelector("aside").hidden = !needsForm;
  studio.fillForm();
  if (studio.leave) { studio.leave(); studio.leave = null; }
  if (page !== "plan" && studio.pages[page]) studio.pages[page]();
  if (needsForm) {
    if (studio.query.get("layout") || studio.first) studio.ask();
    else if (page !== "top") { if (page === "plan") studio.fill(mw.panel("Looking for the best layout", mw.el("p", {class: "quiet"}, "A first answer comes in a second or two.")), ...mw.skeleton(190, 420)); studio.findBest(); }
    studio.first = true;
  }
};

studio.start = async () => {
  mw.palette = JSON.parse(document.getElementById("palette").textContent);
  for (const link of document.querySelectorAll("header.top a:not([data-page='learn'])")) {
    link.addEventListener("click", event => { event.preventDefault(); studio.go({}, link.dataset.page); });
  }
  studio.catalogue = await studio.get("/api/catalogue", "");
  mw.terms = studio.catalogue.terms;
  document.getElementById("form").replaceChildren(studio.buildForm());
  if (innerWidth <= 1020) document.getElementById("controls").open = location.search === "";
  if (!studio.query.get("model") && !["runs", "watch"].includes(studio.page())) {
    for (const [key, value] of Object.entries(START)) studio.query.set(key, value);
    const [path, params] = studio.address();
    history.replaceState(null, "", `${path}?${params}`);
  }
  studio.show();
};
addEventListener("DOMContentLoaded", studio.start);
