"use strict";
/* The best layout of a job is sought beside the sliders; every layout shown is judged by it. */
studio.bests = new Map();  /* layout by job; where nothing fits, the record of that */
studio.jobKey = params => { const job = new URLSearchParams(params); job.delete("layout"); return job.toString(); };
studio.noteBest = (params, view) => {
  if (view.kind === "SearchView" && !view.is_final) return;
  studio.bests.set(studio.jobKey(params), view.kind === "SearchView" ? view.ranked[0].layout : view);
  studio.judge();
};
studio.seekBest = params => {
  const key = studio.jobKey(params);
  if (studio.sought === key || studio.search) return;
  if (studio.seek) studio.seek.abort();
  clearTimeout(studio.seekTimer);
  studio.sought = key;
  studio.seek = new AbortController();
  const {signal} = studio.seek;
  studio.seekTimer = setTimeout(() => {
    if (studio.search) { studio.sought = ""; return; }
    studio.stream("/api/task/search", new URLSearchParams(key), signal, view => studio.noteBest(params, view)).catch(() => { if (studio.sought === key) studio.sought = ""; });
  }, 500);
};
/* Asked once the sliders rest, so that no judgement stands in the way of a figure. */
studio.judge = () => {
  clearTimeout(studio.judgeTimer);
  const record = studio.record, params = studio.job();
  if (!record || record.kind !== "PlanView" || studio.page() !== "plan") return;
  const best = studio.bests.get(studio.jobKey(params));
  if (best === undefined) { studio.seekBest(params); return; }
  if (typeof best !== "string") { studio.showMisfit(best); return; }
  studio.judgeTimer = setTimeout(async () => {
    const asked = new URLSearchParams(params);
    asked.set("best", best);
    const judgement = await studio.get("/api/judgement", asked);
    if (judgement.kind === "Judgement" && studio.record === record && studio.page() === "plan") mw.showJudgement(judgement, layout => studio.go({layout}));
  }, 120);
};
studio.showMisfit = view => {
  const root = document.getElementById("judgement");
  if (view.kind !== "Misfit" || !root) { if (root) root.replaceChildren(); return; }
  const box = mw.el("div");
  mw.render.Misfit(view, box, null, studio.load);
  root.replaceChildren(box.querySelector("ul"));
};
