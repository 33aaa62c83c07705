"use strict";
/* A page that stands alone: every record in it is drawn in order. */
mw.palette = JSON.parse(document.getElementById("palette").textContent);
{
  const root = document.getElementById("content");
  for (const record of JSON.parse(document.getElementById("records").textContent)) mw.render[record.kind](record, root);
  mw.settle(root, document.title);
  mw.drawAll(root);
}
