"""Text of `eagleray top` for a state of the server, fitted to the size of the terminal. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from eagleray.server.dashboard.state import (
    DashboardState,
    EngineRow,
    EventRow,
    ExpertHeat,
    LatencySummary,
    MemberState,
    Traffic,
)

STYLES: dict[MemberState, str] = {"serving": "green", "starting": "yellow", "restarting": "red", "gone": "red"}
BARS = "▁▂▃▄▅▆▇█"
SHADES = "·░▒▓█"
"""Load of an expert from a quarter of its layer's mean to four times as much."""

SHADE_STYLES = ("blue", "cyan", "white", "yellow", "red")
DASH = "–"
CONTROL_CHARACTERS = dict.fromkeys([*range(32), *range(127, 160)], " ")
"""Characters that would move the cursor or break a line, if a cause or a name has them."""


class _Section(NamedTuple):
    """A title and lines below it, of which the first ones are shown if there is no room for all."""

    title: str
    lines: list[Text]

    def head_and_lines(self, room: int | None = None) -> list[Text]:
        """Return as many lines as there is room for, the title among them; None: all."""
        if room == 0:
            return []
        shown = self.lines if room is None else self.lines[: room - 1]
        hidden = len(self.lines) - len(shown)
        return [Text(self.title + (f"  ({hidden} more)" if hidden else ""), style="bold"), *shown]


def render(
    state: DashboardState, rates: Sequence[float], *, width: int, height: int | None, problem: str = ""
) -> RenderableType:
    """Return the state for a terminal of this size, or whole if `height` is None.

    `rates`: tokens generated per second, from the oldest state to the newest. `problem`: why there is no newer state;
    empty if the server is connected.
    """
    head = [_title(state), *_traffic(state.traffic, rates, width)]
    if problem:
        head.insert(0, Text(problem, style="red"))
    sections = [
        _Section("ENGINES", _engine_lines(state)),
        _Section("EXITS AND RECOVERIES", [_event_line(event, state.time) for event in state.events]),
        _Section("NODES", [_node_line(state, index) for index in range(len(state.nodes))]),
        _Section("API SERVERS", [_server_line(state, index) for index in range(len(state.api_servers))]),
    ]
    if state.experts is not None:
        sections.append(_Section("EXPERTS BY LAYER " + _legend(), _expert_lines(state.experts, width)))
    sections = [section for section in sections if section.lines]
    if height is None:
        shown = [*head, *(line for section in sections for line in (Text(), *section.head_and_lines()))]
    else:
        rooms = share_lines(height - len(head), [len(section.lines) + 1 for section in sections])
        lines = [section.head_and_lines(room) for section, room in zip(sections, rooms, strict=True)]
        shown = [*head, *itertools.chain(*lines)]
    for line in shown:
        line.plain = line.plain.translate(CONTROL_CHARACTERS)
        if height is not None:
            line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*shown)


def share_lines(available: int, wanted: Sequence[int]) -> list[int]:
    """Return how many of the `wanted` lines each section gets, as evenly as possible. The first ones get two, a title
    and a line, before another gets any."""
    given = [0] * len(wanted)
    for section, most in enumerate(wanted):
        if available >= 2:
            given[section] = min(2, most)
            available -= given[section]
    while unfinished := [section for section, most in enumerate(wanted) if 0 < given[section] < most]:
        for section in unfinished[:available]:
            given[section] += 1
        if available <= len(unfinished):
            break
        available -= len(unfinished)
    return given


def _title(state: DashboardState) -> Text:
    num_serving = sum(engine.state == "serving" for engine in state.engines)
    is_whole = num_serving == len(state.engines) and state.state == "serving"
    return Text.assemble(
        ("eagleray ", "bold"),
        state.model,
        "  ",
        (state.state, "green" if is_whole else "yellow"),
        f", {num_serving} of {len(state.engines)} engines, weights {state.weight_version}",
    )


def _traffic(traffic: Traffic, rates: Sequence[float], width: int) -> list[Text]:
    return [
        Text(
            f"tokens/s {_rate(traffic.generation_tokens_per_second)} out, "
            f"{_rate(traffic.prompt_tokens_per_second)} in  "
            f"completions/s {_rate(traffic.requests_per_second)}  "
            f"in flight {traffic.num_in_flight}: {traffic.num_running} run, {traffic.num_waiting} wait"
        ),
        Text(
            f"first token {_latency(traffic.time_to_first_token)}  "
            f"per token {_latency(traffic.time_per_output_token)}  "
            f"cache {_percent(traffic.cache_usage)}  hits {_percent(traffic.cache_hits)}"
        ),
        Text(_sparkline(rates[-width:]), style="cyan"),
    ]


def _engine_lines(state: DashboardState) -> list[Text]:
    head = f"{'':12}{'state':18}{'run':>5}{'wait':>6}{'out/s':>8}{'in/s':>8}{'cache':>7}  host, process"
    return [Text(head, style="dim"), *(_engine_line(engine, state.time) for engine in state.engines)]


def _engine_line(engine: EngineRow, now: float) -> Text:
    since = "" if engine.since is None else f" {_ago(now - engine.since)}"
    workers = f", {len(engine.workers)} workers" if len(engine.workers) > 1 else ""
    where = engine.cause or " ".join(str(part) for part in (engine.host, engine.pid) if part is not None) + workers
    return Text.assemble(
        f"{engine.label:11} ",
        (f"{engine.state + since:18}", STYLES[engine.state]),
        f"{engine.num_running:5}{engine.num_waiting:6}{_rate(engine.generation_tokens_per_second):>8}",
        f"{_rate(engine.prompt_tokens_per_second):>8}{_percent(engine.cache_usage):>7}  {where}",
    )


def _event_line(event: EventRow, now: float) -> Text:
    ago = f"{_ago(now - event.time) + ' ago':12}"
    sequel = "a replacement starts" if event.returns else "no replacement follows"
    if event.kind == "lost":
        return Text.assemble(ago, (event.member, "red"), f" exited: {event.cause}; {sequel}")
    if event.kind == "left":
        return Text.assemble(ago, event.member, f" left: {event.cause}; {sequel}")
    if event.kind == "recovered":
        return Text.assemble(ago, (event.member, "green"), f" serves again after {event.downtime:.1f} s")
    return Text.assemble(ago, event.member, " has started")


def _node_line(state: DashboardState, index: int) -> Text:
    node = state.nodes[index]
    engines = ", ".join(node.engines) or "no engine"
    away = f"; away: {node.num_away}" if node.num_away else ""
    return Text.assemble(f"{node.host:11} {engines}; workers: {node.num_workers}", (away, "red"))


def _server_line(state: DashboardState, index: int) -> Text:
    server = state.api_servers[index]
    process = "" if server.pid is None else f", process {server.pid}"
    load = server.cause or f"in flight: {server.num_in_flight}{process}"
    return Text.assemble(f"{server.label:11} ", (f"{server.state:18}", STYLES[server.state]), load)


def _expert_lines(experts: ExpertHeat, width: int) -> list[Text]:
    lines = []
    for layer, load in enumerate(experts.load):
        line = Text(f"{layer:4} {experts.balance[layer]:5.2f} ")
        for level in _levels(load, max(1, width - 11)):
            line.append(SHADES[level], style=SHADE_STYLES[level])
        lines.append(line)
    return lines


def _legend() -> str:
    return f"(balance; {SHADES[0]} a quarter of the mean, {SHADES[2]} the mean, {SHADES[-1]} four times)"


def _levels(load: Sequence[int], width: int) -> Iterable[int]:
    """Return the level of each expert, or of the busiest one of each few neighbours if not all have room."""
    size = math.ceil(len(load) / width)
    for start in range(0, len(load), size):
        percent = max(load[start : start + size])
        yield min(4, max(0, round(2 + math.log2(max(percent, 1) / 100))))


def _sparkline(rates: Sequence[float]) -> str:
    most = max(rates, default=0.0) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(rate / most * len(BARS)))] for rate in rates)


def _latency(latency: LatencySummary) -> str:
    return f"{_seconds(latency.mean)} (p95 {_seconds(latency.p95)})"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(rate: float | None) -> str:
    return DASH if rate is None else f"{rate:.1f}" if rate < 10 else f"{rate:,.0f}"


def _percent(part: float | None) -> str:
    return DASH if part is None else f"{100 * part:.0f} %"


def _ago(seconds: float) -> str:
    for limit, size, unit in ((100, 1, "s"), (6000, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, round(seconds / size))} {unit}"
    return f"{round(seconds / 86_400)} d"
