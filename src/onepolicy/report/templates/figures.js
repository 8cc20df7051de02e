// Draws every figure, again when the theme changes. body[data-figures] tells a test (and the reader) how it went.
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const style = getComputedStyle(document.documentElement);
  const paint = (v) =>
    typeof v === "string" ? (v.startsWith("@") ? style.getPropertyValue("--" + v.slice(1)).trim() || v : v)
    : Array.isArray(v) ? v.map(paint)
    : v !== null && typeof v === "object" ? Object.fromEntries(Object.entries(v).map(([k, w]) => [k, paint(w)]))
    : v;
  const config = { responsive: true, displaylogo: false, modeBarButtons: [["toImage"]] };
  const draw = () => Promise.all(specs.map((spec) =>
    Plotly.react("fig-" + spec.name, paint(spec.data), paint(spec.layout), config)));
  const run = () => draw().then(() => { document.body.dataset.figures = "drawn"; });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", run);
  run();
})();
