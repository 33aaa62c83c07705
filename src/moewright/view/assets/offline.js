"use strict";
/* A page that stands alone: every record in it is drawn in order, then the words of the glossary that they use. */
mw.palette = JSON.parse(document.getElementById("palette").textContent);
mw.terms = JSON.parse(document.getElementById("terms").textContent);
mw.glossary = "";
{
  const root = document.getElementById("content"), words = mw.el("dl", {class: "facts"}), used = new Set();
  const glossary = mw.el("details", {class: "panel", id: "glossary", hidden: true}, mw.el("summary", {}, "Words on this page"), words);
  mw.noteTerm = (word, entry) => {
    if (used.has(entry.anchor)) return;
    used.add(entry.anchor);
    glossary.hidden = false;
    words.append(mw.el("dt", {id: entry.anchor, tabindex: "-1"}, word), mw.el("dd", {}, entry.meaning));
  };
  document.addEventListener("click", event => { if (event.target.closest("a.term")) glossary.open = true; });
  for (const record of JSON.parse(document.getElementById("records").textContent)) mw.render[record.kind](record, root);
  root.append(glossary);
  mw.settle(root, document.title);
}
