"use strict";
/* A run watched by its log: the page asks whether the log has grown, and draws what it shows then. */
mw.render.WatchView = (view, root) => {
  const {watch} = view, answer = mw.el("div");
  mw.render.Document(view.document, answer);
  const points = watch.recent_s.map((seconds, place) => [watch.recent[place], seconds]);
  const shifts = watch.changes.filter(change => change.step >= watch.recent[0]).map(change => ({x: change.step, text: change.kind}));
  // Curves of two ends, not marks: the axis reaches to them, and the legend takes them away.
  const level = (name, part, seconds) => ({name, colour: mw.palette.time[part], points: [points[0], points.at(-1)].map(([step]) => [step, seconds])});
  const band = watch.predicted_s ? [level("plan", "experts", watch.predicted_s), level("least in 95 of 100 cases", "dp_comm", watch.band_s[0]), level("most in 95 of 100 cases", "ep_comm", watch.band_s[1])] : [];
  const [state, ...sections] = answer.childNodes;
  const unit = watch.has_rates ? "seconds of a token of a device" : "seconds of a step";
  root.append(state, mw.panel("Step time", mw.curves("Seconds of the latest steps, beside what the plan expects", [{name: "step", colour: mw.palette.time.attention, points}, ...band], {unit, show: mw.seconds, levels: shifts})), ...sections);
};
studio.pages.watch = async () => {
  const fields = [["path", "A log, a folder of logs or of TensorBoard, or a run's folder", ""], ["model", "Model, where the log or its folder does not say", ""], ["on", "Devices, as 16xH100", ""], ["layout", "Layout, as tp2,ep8,pp4", "mono"]];
  const key = name => name === "path" ? "log" : `run_${name}`;
  const inputs = fields.map(([name, , kind]) => mw.el("input", {type: "text", id: `watch-${name}`, class: kind, value: studio.query.get(key(name)) || ""}));
  const state = mw.el("p", {class: "note", role: "status", id: "watch-state"});
  const start = event => { event.preventDefault(); studio.go(Object.fromEntries(fields.map(([name], place) => [key(name), inputs[place].value.trim()]))); };
  const form = mw.panel("Which run is watched?", mw.el("form", {onsubmit: start}, mw.el("div", {class: "fields"}, fields.map(([name, title], place) => mw.el("div", {class: place ? "" : "all"}, mw.el("label", {for: `watch-${name}`}, title), inputs[place])),
    mw.el("div", {class: "row all"}, mw.el("button", {type: "submit", class: "primary", id: "watch"}, "Watch"), state))));
  studio.fill(form);
  if (!studio.query.get("log")) return;
  let stamp = "", timer = 0, wait = 2000;
  const cancel = new AbortController();
  studio.leave = () => { clearTimeout(timer); cancel.abort(); };
  const look = async () => {
    const params = new URLSearchParams({stamp});
    for (const [name] of fields) if (studio.query.get(key(name))) params.set(name, studio.query.get(key(name)));
    const asked = performance.now();
    try {
      const answer = await studio.get("/api/watch", params, cancel.signal);
      const records = answer.reasons ? [answer] : answer.records;
      if (answer.reasons || records.some(record => record.reasons)) { state.textContent = records.flatMap(record => record.reasons || []).map(reason => reason.text).join("; "); return; }
      stamp = answer.stamp;
      if (records.length) {
        const root = mw.el("div"), at = scrollY;
        for (const record of records) mw.render[record.kind](record, root);
        studio.fill(form, ...root.childNodes);
        scrollTo(0, at);
        wait = Math.max(2000, 10 * (performance.now() - asked));
      }
      state.textContent = answer.live ? "The run is going on: this page follows it." : "Nothing was written for two minutes.";
      timer = setTimeout(look, wait);
    } catch (error) { if (error.name !== "AbortError") state.textContent = error.message; }
  };
  state.textContent = "reading the log …";
  await look();
};
