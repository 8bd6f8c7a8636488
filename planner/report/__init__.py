"""A schedule as one page that opens anywhere: the answer, why, and what happens when.

In: a schedule, and where they are there its profile and the trace of a run. Out: HTML without scripts or links to
anything outside; the same input gives the same bytes.

    facts.py    words and numbers        charts.py    SVG        page.html    how it is laid out
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from planner.contract.hardware import budget_bytes
from planner.contract.profile import Profile
from planner.contract.schedule import Schedule
from planner.contract.store import schedule_hash
from planner.contract.trace import Trace
from planner.frontier import Point
from planner.picture import frontier_png
from planner.report import charts, facts
from planner.timeline import COLOURS

TOLERANCE = 0.05
"""Largest difference of the iteration time for which a plan holds."""


def make_report(
    schedule: Schedule,
    profile: Profile | None = None,
    measured: Trace | None = None,
    tolerance: float = TOLERANCE,
    frontier: Sequence[Point] = (),
    remark: str = "",
) -> str:
    """The page. profile: adds planned times and the critical path; measured: adds what a run took, and whether the plan
    holds; frontier: adds plans for other memories. remark: what to know
    of the figures.

    Raises FormatError where one belongs to another schedule, VerifyError and InfeasibleError where the schedule breaks a
    rule of its profile or does not fit its hardware.
    """
    found = None if profile is None else facts.simulated(schedule, profile)
    verdict = None if measured is None else facts.verdict(schedule, found, measured, tolerance)
    planned = None if found is None else found.trace
    traces = [trace for trace in (planned, measured) if trace is not None]
    limits = [budget_bytes(device) for device in schedule.hardware.devices]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        schedule=schedule,
        hash=schedule_hash(schedule),
        headline=facts.headline(schedule),
        remark=remark,
        limits="" if found is None else found.limits,
        choices=facts.choices(schedule),
        memories=facts.memories(schedule),
        traffic=facts.traffic(schedule),
        causes=[] if found is None else facts.causes(found),
        packs=facts.packs(schedule),
        verdict=verdict,
        frontier=facts.frontier(frontier),
        picture=_data_address(frontier_png(frontier)) if frontier else "",
        colours=_colours(),
        legend=charts.legend(traces),
        charts=_marked(charts.device_charts(traces, limits)) if traces else [],
    )


def _data_address(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"


def _colours() -> list[tuple[str, str]]:
    return [(charts.CLASSES[kind], colour) for kind, colour in COLOURS.items()]


def _marked(drawn: Sequence[charts.Chart]) -> list[tuple[str, Markup]]:
    # all text in them is escaped where they are made
    return [(chart.title, Markup(chart.svg)) for chart in drawn]
