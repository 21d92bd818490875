"""The HTML report: whole, self-contained, true to the files it is made from."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from loadgen.cli import main
from loadgen.run import html, plots, results
from loadgen.svg import Plot, Scale, cdf, density, scale_for
from tests.loadgen.run.fake_server import FakeServer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs at different rates, with tiers, refusals and a hook whose command must be escaped."""
    server = FakeServer(lambda body, headers: {"status": 429} if headers.get("X-Vllm-Priority") == "2" else None)
    folders = []
    with server.in_thread() as url:
        for rate in (40, 80):
            out = tmp_path_factory.mktemp("runs") / f"at-{rate}"
            model = ["--requests", "30", "--arrivals", f"poisson:rate={rate}", "--lengths", "fixed:prompt=9,answer=5"]
            options = ["--tiers", "1,1,1", "--slo", "ttft=60000", "--at", "0.1s:echo '<script>&'"]
            assert main(["run", url, *model, *options, "--out", str(out)]) == 0
            folders.append(out)
    return folders


class Tags(HTMLParser):
    """Open tags, and all addresses that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "html"):
            self.open.append(tag)
        self.scripts += tag == "script"
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag != "html":
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return


def drawings(page: str) -> list[ElementTree.Element]:
    """The plots, parsed: each is well-formed."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_a_run_writes_its_page(runs: list[Path]) -> None:
    """The page is whole, loads nothing, runs no script, and has its plots and the figures of the tables."""
    page = (runs[0] / "report.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.loaded == []
    assert tags.scripts == 0
    assert "url(" not in page
    titles = {svg.attrib["aria-label"] for svg in drawings(page)}
    assert titles >= {"TTFT, ms: distribution", "TTFT, ms", "requests", "requests open", "TTFT of each request"}
    assert "echo &#x27;&lt;script&gt;&amp;&#x27;" in page
    for tier in ("tier 0", "tier 1"):
        assert tier in page


def test_the_page_tells_what_happened(runs: list[Path]) -> None:
    """Outcomes of each tier are drawn in proportion, and a hook is told with when it ran, its status and its output."""
    page = (runs[0] / "report.html").read_text()
    found = json.loads((runs[0] / results.RUN).read_text())
    bars = re.findall(r'flex:(\d+);[^"]*" title="(\d+) (\w+)"', page)
    assert all(flex == count for flex, count, _ in bars)
    for outcome in ("ok", "shed"):
        counts = [int(count) for _, count, name in bars if name == outcome]
        assert sum(counts) == 2 * found["outcomes"][outcome]  # once in its tier, once in all
    (hook,) = found["hooks"]
    row = re.search(rf"<tr><td>{hook['began']:.3g}</td><td>[\d.]+</td><td>0</td>.*?</tr>", page, re.DOTALL)
    assert row
    assert row[0].endswith('<td class="text">&lt;script&gt;&amp;\n</td></tr>')
    assert '<meta name="viewport" content="width=device-width' in page


def test_the_longest_gap_is_where_it_was(runs: list[Path]) -> None:
    """The plot of gaps has the longest pause between two tokens, in ms, at the time when it ended."""
    run = html.load(runs[0])
    slow = msgspec.structs.replace(run.lines[0], tier=None, outcome="ok", times=(1.0, 1.1, 3.1, 3.2))
    (gaps,) = (plot for plot in plots.timelines(plots.RunFiles("slow", run.found, [slow])) if "gap" in plot.title)
    assert gaps.y.high == pytest.approx(2000 * 1.2)
    assert gaps.x.high == pytest.approx(3.2)


def test_several_runs_have_a_capacity_curve(runs: list[Path], tmp_path: Path) -> None:
    """`report` puts runs beside each other: distributions by run and curves over the rate."""
    out = tmp_path / "all.html"
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    page = out.read_text()
    titles = {svg.attrib["aria-label"] for svg in drawings(page)}
    assert {"TTFT by rate", "TPOT by rate", "served by rate", "within SLO by rate"} <= titles
    assert all(run.name in page for run in runs)


def test_runs_of_one_name_stay_apart(runs: list[Path], tmp_path: Path) -> None:
    """Folders of equal names are told apart by their paths; one that is given twice counts once."""
    other = shutil.copytree(runs[1], tmp_path / runs[0].name)
    found = html.load_all([runs[0], other, runs[0], runs[1]])
    assert [run.name for run in found] == [str(runs[0]), str(other), runs[1].name]


def test_a_run_without_a_rate_is_in_no_capacity_curve(runs: list[Path]) -> None:
    """One request has no rate: it is not drawn at 0 requests/s."""
    one, two = html.load(runs[0]), html.load(runs[1])
    without = plots.RunFiles("one", {**one.found, "arrivals": {**one.found["arrivals"], "rate": None}}, one.lines)
    drawn = [[plot.svg() for plot in plots.capacity(each)] for each in ([one, two], [one, two, without])]
    assert drawn[0] == drawn[1]


def test_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a run, and one with another result, are named; nothing is written."""
    out = tmp_path / "r.html"
    assert main(["report", str(tmp_path), "--out", str(out)]) == 1
    (tmp_path / results.RUN).write_text('{"bench": "tiers"}')
    assert main(["report", str(tmp_path), "--out", str(out)]) == 1
    assert "not a result of" in " ".join(capsys.readouterr().out.split())
    assert not out.exists()


def test_a_page_of_nothing_good(runs: list[Path], tmp_path: Path) -> None:
    """A run in which no request ended well has a page too."""
    run = html.load(runs[0])
    bad = [line for line in run.lines if line.outcome != "ok"]
    assert bad
    page = html.page([plots.RunFiles("bad", run.found, bad)])
    assert len(drawings(page)) > 5
    assert "nan" not in page.partition("<details>")[0]


def test_timelines_count_every_request(runs: list[Path]) -> None:
    """The rates of the timeline add up to the requests sent."""
    run = html.load(runs[0])
    assert len(run.lines) == json.loads((runs[0] / results.RUN).read_text())["asked"] == 30
    assert {plot.title for plot in plots.timelines(run)} == {
        *("requests", "answer tokens", "requests open", "longest gap between tokens", "TTFT of each request")
    }
    assert sum(len(group) for group in run.by_tier().values()) == 30


def test_distribution_function() -> None:
    """Sorted values, rising to 100 %."""
    assert cdf([3.0, 1.0]) == [(1.0, 50.0), (3.0, 100.0)]
    assert cdf([]) == []


def test_violin_is_widest_where_most_values_are() -> None:
    """Width 1 at the mode, near 0 at the ends; a single value is a narrow violin, not an error."""
    heights, widths = density(np.random.default_rng(0).normal(5.0, 1.0, 2000))
    assert heights[widths.argmax()] == pytest.approx(5.0, abs=0.5)
    assert widths.max() == 1.0
    assert widths[0] < 0.1
    assert density(np.array([2.0]))[1].max() == 1.0


@pytest.mark.parametrize(
    ("values", "log", "fit"), [([1.0, 9.0], False, [1, 9]), ([0.01, 0.0, 50.0], True, [0.01, 50]), ([], True, [5])]
)
def test_scales_fit_their_values(values: list[float], log: bool, fit: list[float]) -> None:
    """All values lie on the scale (on a logarithmic one those above 0), and it has ticks inside."""
    scale = scale_for(values, log=log)
    assert all(0 <= scale.place(v) <= 1 for v in fit)
    assert scale.ticks()
    assert all(scale.low <= t <= scale.high for t in scale.ticks())


def test_equal_values_have_a_scale() -> None:
    """A scale of one value is not empty, and long texts are cut and escaped."""
    scale = scale_for([4.0, 4.0])
    assert scale.place(4.0) == 0.0
    plot = Plot("a < b", "x", "y", Scale(0, 1), scale)
    plot.upright(0.5, "<" * 99)
    assert ElementTree.fromstring(plot.svg()).attrib["aria-label"] == "a < b"
