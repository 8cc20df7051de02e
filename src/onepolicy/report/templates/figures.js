// Draws every figure, again when the theme changes, a folded section is opened or the page is printed.
// body[data-figures] tells a test (and the reader) how it went.
(() => {
  const { figures, print } = JSON.parse(document.getElementById("figures").textContent);
  const style = getComputedStyle(document.documentElement);
  const themed = (name) => style.getPropertyValue("--" + name).trim();
  const paint = (v, color) =>
    typeof v === "string" ? (v.startsWith("@") ? color(v.slice(1)) || v : v)
    : Array.isArray(v) ? v.map((each) => paint(each, color))
    : v !== null && typeof v === "object"
      ? Object.fromEntries(Object.entries(v).map(([k, w]) => [k, paint(w, color)]))
    : v;
  const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage"]] };
  const draw = (color, more) => Promise.all(figures.map((spec) => Plotly.react(
    "fig-" + spec.name, paint(spec.data, color), { ...paint(spec.layout, color), ...more }, config)));
  const run = () => draw(themed, {}).then(() => { document.body.dataset.figures = "drawn"; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", run);
  document.querySelectorAll("details.section").forEach((each) => each.addEventListener("toggle", run));
  addEventListener("beforeprint", () => draw((name) => print[name], { width: 660 }));  // a page of A4 or Letter
  addEventListener("afterprint", run);
  run();
})();
