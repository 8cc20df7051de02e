"""Figures as files: complete without the page, and drawn."""

import json

import pytest
from PIL import Image

from onepolicy.config import UsageError
from onepolicy.report import png
from onepolicy.report.figures.parts import AXIS, REPLAY, ROLLOUT, Figure, axis, bars, line
from onepolicy.report.page import LIGHT
from onepolicy.report.png import SCALE, SQUARE, write_figures

Y = [1.0, float("nan"), 4.0, 2.0]
CURVE = Figure(
    "curve",
    "A title",
    "A note that is long enough for more than one line of the figure. " * 4,
    [line("a", [1, 2, 3, 4], Y, ROLLOUT, text=["@someone", "x", "y", "z"])],
    {"xaxis": axis("step", tickfont={"size": 9})},
)
DRAWN = [bars("b", ["x", "y"], [1.0, 2.0], REPLAY)]
BARS = Figure("bars", "Bars", "", DRAWN, {}, "third", square=True)


def test_json_is_complete_without_the_page(tmp_path):
    written = write_figures(tmp_path / "figures", [CURVE, BARS], png=False)
    assert [path.name for path in written] == ["curve.json", "bars.json"]
    found = json.loads(written[0].read_text())
    (trace,), layout = found["data"], found["layout"]
    assert trace["line"]["color"] == LIGHT["rollout"]
    assert trace["y"] == [1.0, None, 4.0, 2.0]
    assert trace["text"][0] == "@someone"  # no colour of ours
    font = {"size": 13, "color": LIGHT["muted"]}
    assert layout["xaxis"]["title"] == {"text": "step", "font": font, "standoff": 8}
    assert layout["xaxis"]["tickfont"] == {"size": 9}
    assert layout["yaxis"]["automargin"] == AXIS["automargin"]
    assert layout["title"]["subtitle"]["text"].count("<br>") >= 2
    square = json.loads(written[1].read_text())["layout"]["height"]
    assert layout["height"] > square - SQUARE[1] + 440


@pytest.mark.process
@pytest.mark.needs("chromium")
def test_png_is_drawn_in_its_colours(tmp_path):
    write_figures(tmp_path, [CURVE, BARS], png=True)
    for figure, color in ((CURVE, LIGHT["rollout"]), (BARS, LIGHT["replay"])):
        layout = json.loads((tmp_path / f"{figure.name}.json").read_text())["layout"]
        image = Image.open(tmp_path / f"{figure.name}.png").convert("RGB")
        assert image.size == (SCALE * layout["width"], SCALE * layout["height"])
        counts = {value: count for count, value in image.getcolors(2**24)}
        assert counts[tuple(bytes.fromhex(color[1:]))] > 30
        assert image.getpixel((1, 1)) == (255, 255, 255)


def test_a_missing_browser_is_reported(tmp_path, monkeypatch):
    def missing(*_, **__):
        from kaleido.errors import ChromeNotFoundError

        raise ChromeNotFoundError("no browser")

    monkeypatch.setattr("kaleido.write_fig_from_object_sync", missing)
    with pytest.raises(UsageError, match="install one, or leave --png out"):
        write_figures(tmp_path, [CURVE], png=True)
    monkeypatch.setattr(png, "_draw", missing)
    write_figures(tmp_path, [], png=True)  # nothing to draw needs no browser
