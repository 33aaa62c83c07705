"use strict";
/* The course: a move of a control asks the server for the chapter in its new state, and what differs is changed in place. */
const course = {wanted: 0, shown: 0, isAsking: false};

course.article = () => document.querySelector("article[data-chapter]");
/* Only what the reader has turned away from the chapter's own job stands in the address. */
course.state = () => {
  const params = new URLSearchParams();
  for (const input of course.article().querySelectorAll(".knobs input:checked")) if (!input.defaultChecked || course.turned.has(input.name)) params.set(input.name, input.value);
  return params;
};
course.turned = new Set(new URLSearchParams(location.search).keys());

/* Gives a tree the attributes and the text of another, node by node, so that shapes move and stay the same shapes. */
course.morph = (old, next) => {
  if (old.nodeType !== next.nodeType || old.nodeName !== next.nodeName) { old.replaceWith(next.cloneNode(true)); return; }
  if (old.nodeType === Node.TEXT_NODE) { if (old.data !== next.data) old.data = next.data; return; }
  for (const {name} of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const {name, value} of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const before = [...old.childNodes], after = [...next.childNodes];
  after.forEach((child, index) => { if (before[index]) course.morph(before[index], child); else old.append(child.cloneNode(true)); });
  before.slice(after.length).forEach(child => child.remove());
};

course.change = next => {
  const olds = [...course.article().querySelectorAll("[data-live]")], news = [...next.querySelectorAll("[data-live]")];
  olds.forEach((old, index) => {
    const fresh = news[index];
    if (old.dataset.live === "question") { course.ask(old, fresh); return; }
    if (old.outerHTML === fresh.outerHTML) return;
    const isFigure = old.classList.contains("figure");
    course.morph(old, fresh);
    if (isFigure) { old.classList.remove("moved"); void old.offsetWidth; old.classList.add("moved"); }
  });
};
/* A question about a state that is gone is asked anew. */
course.ask = (form, fresh) => {
  const isSame = form.dataset.answer === fresh.dataset.answer;
  form.dataset.answer = fresh.dataset.answer;
  course.morph(form.querySelector(".because"), fresh.querySelector(".because"));
  const unit = form.querySelector("label.answer"), next = fresh.querySelector("label.answer");
  if (unit) unit.firstChild.data = next.firstChild.data;
  if (!isSame) { course.say(form, form.querySelector(".said").textContent ? "The page has moved: answer again." : "", ""); form.querySelector(".because").hidden = true; }
};
course.say = (form, text, kind) => { const said = form.querySelector(".said"); said.textContent = text; said.className = `said ${kind}`; };

course.check = form => {
  const answer = form.dataset.answer, field = form.querySelector("input[type='text']"), chosen = form.querySelector("input:checked");
  let isRight;
  if (field) {
    const value = Number.parseFloat(field.value.replaceAll(",", "")), wanted = Number(answer);
    if (!Number.isFinite(value)) { course.say(form, "A number is needed.", "wrong"); return; }
    isRight = Math.abs(value - wanted) <= Math.max(.03 * Math.abs(wanted), Math.abs(wanted) < 1 ? .005 : 0);
  } else {
    if (!chosen) { course.say(form, "Choose an answer first.", "wrong"); return; }
    isRight = chosen.value === answer;
  }
  course.say(form, isRight ? "Right." : "Not that. The hint helps; the page has the answer.", isRight ? "right" : "wrong");
  if (isRight) form.querySelector(".because").hidden = false;
};

/* One question is under way at a time; while it runs, only the newest next one is kept. */
course.move = async () => {
  course.wanted += 1;
  if (course.isAsking) return;
  course.isAsking = true;
  const article = course.article(), refused = article.querySelector(".refused");
  while (course.shown !== course.wanted) {
    const asked = course.wanted, params = course.state(), started = performance.now();
    try {
      const answer = await fetch(`/api/lesson/${article.dataset.chapter}?${params}`);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("article");
      const isRefused = next.classList.contains("refusal");
      if (!isRefused) { course.change(next); history.replaceState(null, "", params.size ? `?${params}` : location.pathname); }
      article.classList.toggle("behind", isRefused);
      refused.hidden = !isRefused;
      refused.textContent = !isRefused ? "" : `${next.querySelector("p").textContent}. The pictures show the job before.`;
    } catch (error) { refused.hidden = false; refused.textContent = `The studio does not answer: ${error.message}`; }
    course.shown = asked;
    document.documentElement.dataset.moved = String(asked);
    document.documentElement.dataset.took = String(performance.now() - started);
  }
  course.isAsking = false;
};

/* Tables under a picture turn into cards where they are wider than their box, as those of other pages do. */
course.fitTables = () => {
  for (const box of document.querySelectorAll("details.table-box")) {
    box.fit = () => {
      box.classList.remove("narrow");
      box.classList.toggle("narrow", innerWidth <= 560 || box.scrollWidth > box.clientWidth + 1);
    };
    box.addEventListener("toggle", box.fit);
  }
};
/* What an address points at is not folded. */
course.reveal = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1))), folded = target && target.closest(".folded");
  if (!folded) return;
  folded.querySelector(".unfold").click();
  target.scrollIntoView();
};
/* Of the glossary only the words stay that have the text. */
course.findWords = text => {
  const wanted = text.trim().toLowerCase(), words = [...document.querySelectorAll(".glossary dt")];
  for (const word of words) word.hidden = word.nextElementSibling.hidden = !word.textContent.toLowerCase().includes(wanted);
  for (const part of document.querySelectorAll(".glossary .part")) part.hidden = !part.querySelector("dt:not([hidden])");
  const count = words.filter(word => !word.hidden).length;
  document.getElementById("words-found").textContent = wanted ? `${count} of ${words.length} words` : "";
  mw.settle(document.getElementById("content"));
};

addEventListener("DOMContentLoaded", () => {
  const article = course.article(), find = document.getElementById("find-word");
  course.fitTables();
  mw.settle(document.getElementById("content"));
  course.reveal();
  addEventListener("hashchange", course.reveal);
  if (find) find.addEventListener("input", () => course.findWords(find.value));
  if (article) {
    article.addEventListener("change", event => { if (event.target.closest(".knobs")) { course.turned.add(event.target.name); course.move(); } });
    article.addEventListener("submit", event => { event.preventDefault(); course.check(event.target); });
  }
  document.documentElement.dataset.ready = "true";
});
