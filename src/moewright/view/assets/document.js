"use strict";
/* Documents: titles, lines, facts, tables and items, as `report/document.py` builds them. */
mw.phrase = run => {
  if (typeof run === "string") return run;
  if (run.face === "badge") return mw.el("span", {class: `badge state ${run.tone === "doubtful" ? "warn" : run.tone}`}, run.text);
  return mw.el({strong: "b", code: "code"}[run.face] || "span", {class: run.tone === "plain" ? null : run.tone}, run.text);
};
mw.line = line => [line].flat().map(mw.phrase);
mw.text = line => [line].flat().map(run => typeof run === "string" ? run : run.text).join("");

mw.documentTable = (table, caption) => mw.table(table.columns.map(column => ({t: column.name, n: !column.has_words})),
  table.rows.map(row => row.cells.map(cell => mw.line(cell))), caption, table.rows.map(row => row.is_total));

mw.sectionBody = section => [
  ...section.lines.map(line => mw.el("p", {}, mw.line(line))),
  section.facts.length ? mw.el("dl", {class: "facts"}, section.facts.flatMap(([name, value]) => [mw.el("dt", {}, mw.term(name)), mw.el("dd", {}, mw.line(value))])) : null,
  section.table && section.table.rows.length ? mw.documentTable(section.table, mw.text(section.title) || section.table.columns[0].name) : null,
  section.items ? mw.el(section.items.is_numbered ? "ol" : "ul", {class: "plain"}, section.items.items.map(item => mw.el("li", {}, mw.line(item)))) : null,
  ...section.notes.map(note => mw.el("p", {class: "note"}, mw.line(note))),
  ...section.sections.map(mw.part)];

/* A section inside of another; one with a title that a terminal shows with -v at most is folded. */
mw.part = section => {
  const title = mw.text(section.title) ? mw.line(section.title) : null;
  if (!title || section.extent === "short") return mw.el("div", {class: "part"}, title ? mw.el("h3", {}, title) : null, mw.sectionBody(section));
  return mw.el("details", {open: section.tone === "bad"}, mw.el("summary", {}, title, section.brief ? [" ", mw.el("span", {class: `badge ${section.tone}`}, section.brief)] : null), mw.sectionBody(section));
};
mw.sectionPanel = section => section.extent === "short" ? mw.panel(mw.text(section.title) ? mw.line(section.title) : "", mw.sectionBody(section)) : mw.panel("", mw.part(section));

mw.render.Document = (view, root) => {
  root.append(mw.el("section", {class: "panel verdict"}, mw.el("h1", {}, view.heading || view.subject), view.heading && view.subject ? mw.el("p", {class: "quiet"}, view.subject) : null),
    ...view.sections.map(mw.sectionPanel));
};
