"use strict";
/* Words of the glossary: labels of controls and figures say what they mean, and lead to their place. */
studio.terms = {};
studio.markTerms = () => {
  for (const label of document.querySelectorAll(".control[data-key] label, .tile > span")) {
    if (label.querySelector("a")) continue;
    const control = label.closest(".control"), words = label.textContent.trim();
    const entry = (control && studio.terms[control.dataset.key]) || studio.terms[words.toLowerCase()];
    if (entry) label.replaceChildren(mw.el("a", {class: "term", href: `/learn/glossary#${entry.anchor}`, title: entry.meaning}, words));
  }
};
addEventListener("DOMContentLoaded", async () => {
  studio.terms = await studio.get("/api/terms", "");
  new MutationObserver(studio.markTerms).observe(document.body, {childList: true, subtree: true});
  studio.markTerms();
});
