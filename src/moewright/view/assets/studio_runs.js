"use strict";
/* Run folders: a list, a page that follows a run while it trains, and runs over each other. */
studio.pages.runs = async () => {
  const asked = studio.query.getAll("run");
  const box = mw.el("input", {type: "text", id: "run-folder", value: asked.join(" "), placeholder: "runs/quickstart"});
  const list = mw.el("div", {class: "chips"});
  const state = mw.el("p", {class: "note", role: "status", id: "run-state"});
  const file = mw.el("input", {type: "file", id: "trace-file", accept: ".json,.gz,.txt,.log"});
  const form = mw.panel("Run folders", mw.el("label", {for: "run-folder"}, "A run's folder, or a trace or log on this machine; several, separated by spaces, lie over each other"),
    mw.el("div", {class: "row"}, box, mw.el("button", {type: "button", class: "primary", id: "open-run", onclick: () => studio.go({run: box.value.trim().split(/\s+/).filter(Boolean)})}, "Open")), list,
    mw.el("div", {style: "margin-top:.6rem"}, mw.el("label", {for: "trace-file"}, "Or drop a trace or a Megatron-LM log to have it diagnosed: "), file), state);
  studio.fill(form);
  file.addEventListener("change", async () => {
    if (!file.files[0]) return;
    if (studio.leave) studio.leave();
    state.textContent = "diagnosing …";
    const answer = await studio.post("/api/drop", await file.files[0].arrayBuffer(), new URLSearchParams({name: file.files[0].name}));
    state.textContent = answer.reasons ? answer.reasons.map(reason => reason.text).join("; ") : file.files[0].name;
    if (!answer.reasons) { const root = mw.el("div"); mw.render[answer.kind](answer, root); studio.fill(form, ...root.childNodes); }
  });
  const found = await studio.get("/api/runs", "");
  list.replaceChildren(...found.map(name => mw.el("button", {type: "button", class: "chip", onclick: () => studio.go({run: name})}, name)));
  if (!asked.length) return;
  let stamp = "", timer = 0, gone = false;
  studio.leave = () => { gone = true; clearTimeout(timer); };
  const look = async () => {
    const params = new URLSearchParams(asked.map(name => ["run", name]));
    params.set("stamp", stamp);
    const answer = await studio.get("/api/run", params);
    if (gone) return;
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
