"""The frame of the report: style sheet and the script that paints the figures in the reader's theme."""

from __future__ import annotations

from onepolicy.report.figure import FONT

LIGHT = {
    "page": "#f5f6f8",
    "paper": "#ffffff",
    "ink": "#1d2430",
    "muted": "#667085",
    "line": "#e4e7ec",
    "rollout": "#d33f49",
    "rollout-soft": "#ec9aa0",
    "trainer": "#2f6fde",
    "trainer-soft": "#94b8f5",
    "replay": "#1f9254",
    "bad": "#b42318",
    "good": "#1f7a48",
}
DARK = {
    "page": "#0f1217",
    "paper": "#181d25",
    "ink": "#e6e9ee",
    "muted": "#98a2b3",
    "line": "#2b323d",
    "rollout": "#ff6b74",
    "rollout-soft": "#a5484f",
    "trainer": "#6ea1ff",
    "trainer-soft": "#3b5f9e",
    "replay": "#45c983",
    "bad": "#ff8a80",
    "good": "#5ad28f",
}


def _variables(palette: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in palette.items())


CSS = (
    f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
body {{ font: 15px/1.5 {FONT}; }}
"""
    + """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); }
main { max-width: 1240px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 19px; letter-spacing: -0.01em; margin: 44px 0 4px; }
h3 { font-size: 15px; line-height: 1.35; margin: 0; }
p { margin: 0; }
.lead { color: var(--muted); margin-bottom: 14px; max-width: 80ch; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin-bottom: 22px; }
.chip { background: var(--paper); border: 1px solid var(--line); border-radius: 999px; padding: 2px 11px;
  font-size: 13px; overflow-wrap: anywhere; }
.chip b { font-weight: 500; color: var(--muted); margin-right: 5px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 12px;
  padding: 16px 18px; min-width: 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin-bottom: 12px; }
.tile .name { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 23px; font-weight: 600; letter-spacing: -0.02em; font-variant-numeric: tabular-nums; }
.tile .more { color: var(--muted); font-size: 13px; }
.good { color: var(--good); } .bad { color: var(--bad); }
.verdict p + p { margin-top: 4px; }
.rule { color: var(--muted); font-size: 13px; }
.verdict { margin-bottom: 12px; }
.grid { display: grid; grid-template-columns: repeat(6, minmax(0, 1fr)); gap: 16px; }
.third { grid-column: span 2; } .half { grid-column: span 3; } .wide { grid-column: 1 / -1; }
.figure { display: flex; flex-direction: column; }
.figure .note { color: var(--muted); font-size: 13px; margin-top: 2px; max-width: 100ch; }
.plot { height: 300px; margin-top: auto; padding-top: 8px; }
.third .plot { height: 260px; }
.wide .plot { height: 360px; }
.square .plot { height: 460px; }
.absent { color: var(--muted); font-size: 14px; margin-top: 12px; padding-left: 18px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--muted); font-size: 13px; padding: 4px 12px 6px 0;
  vertical-align: bottom; }
td { border-top: 1px solid var(--line); padding: 8px 12px 8px 0; vertical-align: top; }
.numbers th + th, .numbers td + td { text-align: right; white-space: nowrap; }
.numbers th:nth-child(3) { color: var(--trainer); } .numbers th:nth-child(4) { color: var(--replay); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 220px; overflow-y: auto;
  font: 12.5px/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.prompt { color: var(--muted); } .response { margin-top: 6px; }
details { margin-top: 12px; } summary { cursor: pointer; font-weight: 500; }
details pre { max-height: none; margin-top: 10px; }
footer { color: var(--muted); font-size: 13px; margin-top: 40px; }
@media (max-width: 820px) {
  main { padding: 20px 12px 40px; } .third, .half { grid-column: 1 / -1; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); } .tile .value { font-size: 19px; }
  .card { padding: 13px 13px; } .plot, .wide .plot { height: 290px; } .square .plot { height: 340px; }
  .numbers td:first-child { min-width: 130px; } .samples thead { display: none; }
  .samples, .samples tbody, .samples tr { display: block; }
  .samples td { display: block; border: 0; padding: 3px 0; }
  .samples tr { border-top: 1px solid var(--line); padding: 10px 0; }
  .samples td[data-name]::before { content: attr(data-name) " "; color: var(--muted); margin-right: 4px; }
}
@media print { .card { break-inside: avoid; } }
"""
)

# Draws every figure, again when the theme changes. body[data-figures] tells a test (and the reader) how it went.
SCRIPT = """
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
"""
