"""The page says what the schedule, its simulation and its run say; it is small, whole, and needs nothing from outside."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import msgspec
import pytest

from planner.cli import main
from planner.contract import store
from planner.contract.errors import FormatError
from planner.contract.trace import MemorySample, Span, Trace
from planner.report import charts, make_report
from planner.search import plan
from planner.search.critical import CAUSES
from planner.simulate import simulate
from tests.planner.chains import random_chain, server
from tests.planner.tiny import PROFILE, TWO, TWO_PROGRAM, hardware, measured, schedule_of

SCHEDULE = schedule_of(TWO_PROGRAM, TWO)
PLANNED = simulate(SCHEDULE, PROFILE, hardware(2))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VOID = ("meta", "img", "br")


class Elements(HTMLParser):
    """Checks that every element is closed in its order, and collects texts and what is loaded."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data.strip())


def test_a_schedule_alone_says_how_fast_and_how_large_and_what_else_it_needs() -> None:
    page = Elements(make_report(SCHEDULE))
    assert "tiny on 2 devices" in page.texts["h1"]
    assert "1.00 s" in page.texts["b"]
    assert "50.0%" in page.texts["b"]
    assert "976.6 KiB of 976.6 KiB" in page.texts["span"]
    assert "--profile PROFILE" in page.texts["code"]
    assert "svg" not in page.names


def test_a_profile_adds_why_and_when() -> None:
    page = Elements(make_report(SCHEDULE, PROFILE))
    causes = [text for text in page.texts["dt"] if text in CAUSES]
    assert {"compute", "recompute", "update"} <= set(causes)
    shares = [float(share) for text in page.texts["span"] for share in re.findall(r"\((.*)%\)", text)]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    tips = page.texts["title"][1:]
    spans = [s for s in PLANNED.spans if s.stream == "compute" and s.action[0] in "FB"]
    assert spans
    for span in spans:
        assert sum(tip.startswith(f"{span.action}: ") for tip in tips) == 1


def test_a_run_adds_every_figure_twice_and_the_verdict() -> None:
    holds = Elements(make_report(SCHEDULE, PROFILE, measured(PLANNED, slower=1.01)))
    assert "Measured: the plan holds" in holds.texts["b"]
    slow = Elements(make_report(SCHEDULE, PROFILE, measured(PLANNED, slower=1.2)))
    assert "Measured: the plan does not hold." in slow.texts["b"]
    assert any("+20.0%, tolerance 5.0%" in text for text in slow.texts["li"])
    assert "+20.00%" in slow.texts["td"]
    assert {"planned compute", "measured compute"} <= set(slow.texts["text"])
    looser = make_report(SCHEDULE, PROFILE, measured(PLANNED, slower=1.2), tolerance=0.25)
    assert "Measured: the plan holds" in Elements(looser).texts["b"]


def test_the_page_loads_nothing_runs_nothing_and_is_the_same_each_time() -> None:
    text = make_report(SCHEDULE, PROFILE, measured(PLANNED))
    page = Elements(text)
    assert page.loaded == []
    assert "script" not in page.names
    assert "http" not in text
    assert text == make_report(SCHEDULE, PROFILE, measured(PLANNED))


def test_names_are_text_whatever_they_hold() -> None:
    model = msgspec.structs.replace(SCHEDULE.profile.model, name="<script>alert(1)</script>&amp;")
    profile = msgspec.structs.replace(SCHEDULE.profile, model=model)
    page = Elements(make_report(msgspec.structs.replace(SCHEDULE, profile=profile)))
    assert "script" not in page.names
    assert page.texts["h1"] == ["<script>alert(1)</script>&amp; on 2 devices"]


def test_a_trace_of_another_schedule_is_refused() -> None:
    other = msgspec.structs.replace(measured(PLANNED), schedule_hash="0" * 16)
    with pytest.raises(FormatError, match=r"planned for schedule .*, measured on schedule 0000"):
        make_report(SCHEDULE, PROFILE, other)


# ---- long programs


def long_trace(num_spans: int) -> Trace:
    """One device that computes num_spans times a millisecond, and a copy that takes long."""
    spans = [Span(f"B0.{i}", 0, "compute", i / 1e3, (i + 1) / 1e3) for i in range(num_spans)]
    spans.append(Span("in:WB0", 0, "h2d", 0.0, num_spans / 2e3, 1 << 30))
    samples = [MemorySample(0, i / 2e3, (i % 7) << 20) for i in range(2 * num_spans)]
    return msgspec.structs.replace(
        PLANNED,
        devices=PLANNED.devices[:1],
        iteration_seconds=(num_spans / 1e3,),
        spans=tuple(spans),
        memory=tuple(samples),
    )


def test_a_hundred_thousand_actions_are_a_small_picture_with_nothing_lost() -> None:
    (chart,) = charts.device_charts([long_trace(100_000)], [8 << 20])
    assert len(chart.svg) < 200_000
    assert "in:WB0: weights in, 50.0 s, 1.0 GiB" in chart.svg
    # the row of compute is full from its left to its right
    (shape,) = re.findall(r'<path class="k1" d="([^"]*)"', chart.svg)
    bars = [(float(x), float(width)) for x, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", shape)]
    assert sum(width for _, width in bars) == pytest.approx(charts.WIDTH - charts.LEFT, rel=0.01)


def test_no_more_bars_than_a_browser_draws_at_once() -> None:
    (chart,) = charts.device_charts([long_trace(1000)], [8 << 20])
    assert 0 < chart.svg.count("<rect") <= charts.MAX_BARS


def test_lines_keep_the_extremes_of_every_column() -> None:
    points = [(x / 10, float(y)) for x, y in enumerate([5, 1, 9, 5, 5, 5, 5, 5, 5, 5, 6, 3])]
    assert charts.steps(points) == "M0 5.0H0V1.0H0V9.0H0V5.0H1V6.0H1V3.0H1"
    assert charts.steps([]) == ""


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.5, 7.0, list(range(8))),
        (0.0, 39.2, [0, 5, 10, 15, 20, 25, 30, 35]),
        (0.0, 4e-5, [0, 5e-6, 1e-5, 1.5e-5, 2e-5, 2.5e-5, 3e-5, 3.5e-5, 4e-5]),
    ],
)
def test_ticks_are_round_numbers(start: float, end: float, expected: list[float]) -> None:
    assert charts.ticks(start, end) == pytest.approx(expected)


# ---- the command


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A plan of a chain, its profile, and the trace of a run that follows it."""
    profile, hardware = random_chain(Random(0), 6), server(2)
    schedule = plan(profile, hardware, minibatch=4).schedule
    assert schedule is not None
    trace = measured(simulate(schedule, profile, hardware))
    other = str(tmp_path / "other.json")
    store.save(random_chain(Random(1), 6), other)
    paths = {name: str(tmp_path / f"{name}.json") for name in ("schedule", "profile", "measured")}
    store.save(schedule, paths["schedule"])
    store.save(profile, paths["profile"])
    store.save(trace, paths["measured"])
    return paths | {"other": other, "page": str(tmp_path / "report.html")}


def all_options(files: dict[str, str]) -> list[str]:
    options = ["--profile", files["profile"], "--measured", files["measured"]]
    return ["report", files["schedule"], *options, "--frontier", "1MB,60MB,120MB", "-o", files["page"]]


def test_the_command_writes_a_page_with_plans_for_other_memory(files: dict[str, str]) -> None:
    assert main(all_options(files)) == 0
    page = Elements(Path(files["page"]).read_text())
    assert "With other memory" in page.texts["h2"]
    assert {"57.2 MiB", "114.4 MiB", "does not fit"} <= set(page.texts["td"])
    (picture,) = page.loaded
    assert picture.startswith("data:image/png;base64,")


def test_wrong_input_is_one_line(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    schedule, page = files["schedule"], files["page"]
    for arguments, complaint in (
        (["--frontier", "8GiB"], "--frontier 8GiB: plans anew, which needs the schedule's --profile PROFILE"),
        (["--profile", files["measured"]], "measured.json: "),
        (["--profile", files["other"]], "profile"),
        (["--profile", files["profile"], "--frontier", "much"], "'much'"),
        (["--tolerance", "little"], "--tolerance 'little': no share"),
        (["--measured", "nowhere.json"], "nowhere.json"),
    ):
        assert main(["report", schedule, *arguments, "-o", page]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert complaint in err
        assert err.count("\n") == 1
        assert not Path(page).exists()
    assert main(["report", schedule]) == 2
    assert main(["report", "-", "--profile", "-", "-o", page]) == 2


def test_a_browser_draws_the_page(files: dict[str, str], tmp_path: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    assert main(all_options(files)) == 0
    picture = tmp_path / "page.png"
    quiet = (
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    )
    subprocess.run(
        [
            browser,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *quiet),
            *(f"--user-data-dir={tmp_path / 'browser'}", "--window-size=1000,3000"),
            *(f"--screenshot={picture}", Path(files["page"]).as_uri()),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    png = picture.read_bytes()
    assert struct.unpack(">II", png[16:24]) == (1000, 3000)
    # an empty page of that size is some 10 kB
    assert len(png) > 60_000
