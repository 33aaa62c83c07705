"use strict";
/* What if: the same layout around its own point, an option at a time; a bar leads to its job. */
studio.whatIfPanel = () => {
  const places = mw.el("div", {class: "multiples", role: "status"}, mw.el("p", {class: "note"}, "Estimating …"));
  const panel = mw.wide(mw.panel("What if", mw.el("p", {class: "note"}, "The same layout with one option of the job changed: tokens/s a device. A click leads there."), places));
  panel.id = "what-if";
  return panel;
};
studio.whatIfBar = (axis, point, most) => {
  if (point.rule) return mw.el("div", {class: "multiple none", title: point.rule}, mw.el("span", {}, point.label), mw.el("span", {class: "note"}, point.rule));
  const [path, params] = studio.address({[axis.key]: point.value}, "plan");
  const bar = mw.el("i", {class: `bar ${point.verdict}`, style: `width:${(100 * point.tokens_per_s_per_device / most).toFixed(1)}%`});
  return mw.el("a", {class: "multiple", href: `${path}?${params}`, "aria-current": point.is_own ? "true" : null, title: `${mw.seconds(point.step_s)} a step, ${mw.bytes(point.peak_bytes)}, ${mw.verdictWords[point.verdict].toLowerCase()}`,
    onclick: event => { event.preventDefault(); studio.go({[axis.key]: point.value}, "plan"); }}, mw.el("span", {}, point.label), mw.el("span", {class: "rail"}, bar), mw.el("b", {}, mw.digits(point.tokens_per_s_per_device)));
};
studio.whatIfRows = view => [["option", "value", "tokens/s a device", "step", "peak", "verdict"], ...view.axes.flatMap(axis => axis.points.map(point => [axis.title, point.label,
  ...(point.rule ? ["", "", "", point.rule] : [mw.digits(point.tokens_per_s_per_device), mw.seconds(point.step_s), mw.bytes(point.peak_bytes), mw.verdictWords[point.verdict]])]))];
/* Asked once the choices rest, as the judgement is. */
studio.askWhatIf = () => {
  clearTimeout(studio.whatIfTimer);
  const {record} = studio, cards = studio.content().querySelector(".cards");
  if (!record || record.kind !== "PlanView" || !cards) return;
  const shown = document.getElementById("what-if"), panel = shown || studio.whatIfPanel();
  cards.append(panel);
  studio.whatIfTimer = setTimeout(async () => {
    const view = await studio.get("/api/what-if", studio.job());
    if (view.kind !== "WhatIfView" || studio.record !== record || !panel.isConnected) return;
    const most = Math.max(...view.axes.flatMap(axis => axis.points.map(point => point.tokens_per_s_per_device)));
    panel.querySelector(".multiples").replaceChildren(...view.axes.map(axis => mw.el("div", {}, mw.el("h3", {}, axis.title), axis.points.map(point => studio.whatIfBar(axis, point, most)))));
    panel.querySelector(".copies")?.remove();
    panel.append(mw.el("div", {class: "row copies no-print"}, mw.rowCopies(() => studio.whatIfRows(view), "what if")));
    if (!shown) mw.settle(studio.content());
  }, 700);
};
