"use strict";
/* Run folders: a list, a page that follows a run while it trains, runs over each other; traces and logs under a stated job. */
studio.jobKeys = [["model", "Model: a name, an id of the hub, a config.json", {list: "models"}], ["on", "Devices, as 16xH100", {}], ["layout", "Layout, as tp2,ep8,pp4", {class: "mono"}], ["global_batch", "Global batch, sequences", {}], ["seq_len", "Sequence, tokens", {}]];
studio.fileJob = () => Object.fromEntries(studio.jobKeys.map(([key]) => [key, studio.query.get(`run_${key}`) || ""]));
/* What a file does not say of its job is asked for here; the address keeps it, apart from the job of the other pages. */
studio.fileJobForm = missing => {
  const said = studio.fileJob(), isSaid = Object.values(said).some(Boolean);
  const fields = studio.jobKeys.map(([key, label, extra]) => mw.el("div", {class: key === "model" || key === "layout" ? "all" : ""}, mw.el("label", {for: `of-${key}`}, mw.term(label, key), missing.includes(key) ? mw.el("b", {class: "missing"}, " is missing") : ""),
    mw.el("input", {type: "text", id: `of-${key}`, name: key, value: said[key], autocomplete: "off", spellcheck: "false", ...extra})));
  const take = () => studio.go(Object.fromEntries(fields.map(field => field.querySelector("input")).map(input => [`run_${input.name}`, input.value.trim()])));
  const copy = () => { for (const [key] of studio.jobKeys) document.getElementById(`of-${key}`).value = studio.query.get(key) || ""; };
  const form = mw.panel(missing.length ? "Whose step is it?" : "The job of this file", mw.el("p", {class: "note"}, missing.length ? "With its job known, the file gets a verdict, a waterfall from the ideal step, and a price for every fix." : isSaid ? "As it was said here." : "As the file, or what lies beside it, says."),
    mw.el("form", {onsubmit: event => { event.preventDefault(); take(); }}, mw.el("div", {class: "fields"}, ...fields), mw.el("div", {class: "row", style: "margin-top:.6rem"}, mw.el("button", {type: "submit", class: "primary", id: "diagnose"}, "Diagnose with this job"), studio.query.get("layout") ? mw.el("button", {type: "button", onclick: copy}, "Take the job of the page Plan") : "")));
  form.id = "file-job";
  return form;
};
/* A file on its way: bytes that have gone, then bytes that were read. */
studio.upload = (path, file, params, tell) => new Promise((resolve, reject) => {
  const request = new XMLHttpRequest();
  request.upload.addEventListener("progress", event => tell(event.loaded, file.size));
  request.addEventListener("load", () => resolve(JSON.parse(request.responseText)));
  request.addEventListener("error", () => reject(new Error("the studio does not answer")));
  request.open("POST", `${path}?${params}`);
  request.send(file);
});
studio.pages.runs = async () => {
  const asked = studio.query.getAll("run");
  const box = mw.el("input", {type: "text", id: "run-folder", value: asked.join(" "), placeholder: "runs/quickstart"});
  const list = mw.el("div", {class: "chips"});
  const state = mw.el("p", {class: "note", role: "status", id: "run-state"});
  const bar = mw.el("progress", {"aria-label": "reading the file", hidden: true});
  const file = mw.el("input", {type: "file", id: "trace-file", accept: ".json,.gz,.txt,.log,.sqlite"});
  const noJob = Object.fromEntries(studio.jobKeys.map(([key]) => [`run_${key}`, ""]));
  const form = mw.panel("Run folders", mw.el("label", {for: "run-folder"}, "A run's folder, or a trace or log on this machine; several, separated by spaces, lie over each other"),
    mw.el("div", {class: "row"}, box, mw.el("button", {type: "button", class: "primary", id: "open-run", onclick: () => studio.go({...noJob, run: box.value.trim().split(/\s+/).filter(Boolean)})}, "Open")), list,
    mw.el("div", {style: "margin-top:.6rem"}, mw.el("label", {for: "trace-file"}, "Or drop a trace or a Megatron-LM log to have it diagnosed: "), file), state, bar);
  const tell = (word, done, total) => { bar.hidden = false; bar.max = total || 1; bar.value = done; state.textContent = `${word} ${mw.bytes(done)} of ${mw.bytes(total)}`; };
  const rest = text => { bar.hidden = true; bar.removeAttribute("value"); state.textContent = text; };
  const take = async dropped => {
    if (studio.leave) studio.leave();
    try {
      const answer = await studio.upload("/api/drop", dropped, new URLSearchParams({name: dropped.name}), (done, total) => tell(`${dropped.name}: sent`, done, total));
      if (answer.reasons) { rest(answer.reasons.map(reason => reason.text).join("; ")); return; }
      studio.go({...noJob, run: answer.run});
    } catch (error) { rest(error.message); }
  };
  studio.fill(form);
  file.addEventListener("change", () => { if (file.files[0]) take(file.files[0]); });
  form.addEventListener("dragover", event => event.preventDefault());
  form.addEventListener("drop", event => { event.preventDefault(); if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]); });
  const found = await studio.get("/api/runs", "");
  list.replaceChildren(...found.map(name => mw.el("button", {type: "button", class: "chip", onclick: () => studio.go({...noJob, run: name})}, name)));
  if (!asked.length) return;
  let stamp = "", timer = 0, gone = false;
  const cancel = new AbortController();
  studio.leave = () => { gone = true; clearTimeout(timer); cancel.abort(); };
  const diagnose = async () => {
    state.textContent = "diagnosing …";
    bar.hidden = false;
    await studio.stream("/api/task/diagnosis", new URLSearchParams({path: asked[0], ...studio.fileJob()}), cancel.signal, view => {
      if (gone) return;
      if (view.total) { tell("read", view.done, view.total); return; }
      const root = mw.el("div");
      if (view.reasons) { rest(view.reasons.map(reason => reason.text).join("; ")); studio.fill(form, studio.fileJobForm([])); return; }
      rest(asked[0].replace(/^.*\//, ""));
      mw.render[view.kind](view, root);
      studio.fill(form, ...(view.missing.length ? [studio.fileJobForm(view.missing)] : []), ...root.childNodes, ...(view.missing.length ? [] : [studio.fileJobForm([])]));
      document.documentElement.dataset.diagnosed = asked[0];
    }).catch(error => { if (error.name !== "AbortError") rest(error.message); });
  };
  const look = async () => {
    const params = new URLSearchParams(asked.map(name => ["run", name]));
    params.set("stamp", stamp);
    const answer = await studio.get("/api/run", params);
    if (gone) return;
    if (answer.is_file) { await diagnose(); return; }
    if (answer.stamp !== stamp) {
      stamp = answer.stamp;
      const root = mw.el("div"), at = scrollY;
      for (const record of answer.records) mw.render[record.kind](record, root, studio.mend);
      studio.fill(form, ...root.childNodes);
      scrollTo(0, at);
    }
    state.textContent = answer.live ? "The run is going on: this page follows it." : "";
    document.documentElement.dataset.stamp = stamp;
    timer = setTimeout(look, answer.live ? 2000 : 5000);
  };
  await look();
};
