"""A page in headless Chromium inside a frame of any width, as a phone shows it, and the parts that
a reader would see."""

import html as html_module
import json
import re
import subprocess
from contextlib import ExitStack

from support.browser import headless, with_script

# Runs in the page: waits until the figures are drawn, then tells the frame around it what is where.
INSPECT = """<script>
  const errors = [];
  const noteFailure = (event) => errors.push(event.message || "failed to load " + event.target.src);
  addEventListener("error", noteFailure, true);
  addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
  const all = (where, what) => [...where.querySelectorAll(what)];
  const box = (element) => element.getBoundingClientRect();
  const meet = (a, b) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const outside = (a, b) =>
    a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
  const inspect = () => {
    const figures = {}, cut = [], overlapping = [];
    for (const plot of all(document, ".plot")) {
      const name = plot.id.replace("fig-", "");
      figures[name] = all(plot, ".points path, .point path, path.point, path.js-line").length;
      for (const text of all(plot, "text"))
        if (outside(box(text), box(plot))) cut.push(name + ": " + text.textContent);
      for (const kind of [".xtick text", ".ytick text"]) {
        const ticks = all(plot, kind);
        for (let i = 1; i < ticks.length; i++)
          if (meet(box(ticks[i - 1]), box(ticks[i])))
            overlapping.push(name + ": " + ticks[i].textContent);
      }
    }
    for (const element of all(document, "h1, h2, h3, p, li, td, th, .chip, .value, pre, summary"))
      if (!element.closest(".scroll") && box(element).width && box(element).right > innerWidth + 1)
        cut.push(element.tagName + ": " + element.textContent.slice(0, 60));
    parent.postMessage({
      figures, cut, overlapping, errors,
      width: innerWidth, wider: document.documentElement.scrollWidth - innerWidth,
      loaded: performance.getEntriesByType("resource").map((entry) => entry.name),
      background: getComputedStyle(document.body).backgroundColor,
      headings: all(document, "h1, h2, h3").map((heading) => +heading.tagName[1]),
      unnamed: all(document, ".plot")
        .filter((plot) => !plot.getAttribute("aria-label").trim()).length,
    }, "*");
  };
  const figuresDrawn = () => document.body && document.body.dataset.figures === "drawn";
  const wait = () => figuresDrawn() ? inspect() : setTimeout(wait, 50);
  wait();
</script>"""
OUTER = """<body style="margin:0">
<iframe src="page.html" style="border:0;width:{width}px;height:20000px"></iframe>
<pre id="found"></pre><script>addEventListener("message", (event) => {{
  document.getElementById("found").textContent = JSON.stringify(event.data); }});</script></body>"""


def inspected(html, folder, views):
    """Open all views, (width, dark) each, at once and return the page's report on itself in
    each."""
    commands = []
    for width, dark in views:
        own = folder / f"{width}-{dark}"
        own.mkdir(parents=True)
        (own / "page.html").write_text(with_script(html, INSPECT))
        (own / "outer.html").write_text(OUTER.format(width=width))
        command = [*headless(own), "--window-size=1400,900", "--virtual-time-budget=8000"]
        command += ["--force-dark-mode"] if dark else []
        commands.append([*command, "--dump-dom", (own / "outer.html").as_uri()])
    with ExitStack() as stack:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        running = [stack.enter_context(subprocess.Popen(c, **pipes)) for c in commands]
        stack.callback(lambda: [process.kill() for process in running])
        return [_found(process.communicate(timeout=120)[0]) for process in running]


def _found(dom):
    text = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert text, "the page never said that it is drawn"
    assert text[1], "the page never said that it is drawn"
    return json.loads(html_module.unescape(text[1]))
