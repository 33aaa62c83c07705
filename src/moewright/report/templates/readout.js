// Reads the curves under the pointer: the paths themselves carry the values, in a box of 1000 by 1000.
for (const canvas of document.querySelectorAll(".canvas")) {
  const [xLow, xHigh] = canvas.dataset.x.split(" ").map(Number);
  const [yLow, yHigh] = canvas.dataset.y.split(" ").map(Number);
  const curves = [...canvas.querySelectorAll(".curve")].map((path) => ({
    label: path.dataset.label,
    points: path.getAttribute("d").slice(1).split("L").filter(Boolean).map((spot) => spot.split(" ").map(Number)),
  })).filter((curve) => curve.points.length);
  const cursor = canvas.querySelector(".cursor");
  const readout = canvas.closest("figure").querySelector(".readout");
  const nearest = (points, at) => points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const spots = curves.map((curve) => nearest(curve.points, (1000 * (event.clientX - box.left)) / box.width));
    if (!spots.length) return;
    const step = Math.round(xLow + ((xHigh - xLow) * spots[0][0]) / 1000);
    const values = curves.map((curve, i) => [curve.label, yHigh - ((yHigh - yLow) * spots[i][1]) / 1000]);
    if (values.length > 12) values.sort((a, b) => b[1] - a[1]).splice(6);
    cursor.hidden = false;
    cursor.style.left = `${spots[0][0] / 10}%`;
    readout.textContent = `step ${step}: ${values.map(([label, value]) => `${label} ${value.toFixed(3)}`).join(", ")}`;
  });
  canvas.addEventListener("pointerleave", () => {
    cursor.hidden = true;
    readout.textContent = "";
  });
}
