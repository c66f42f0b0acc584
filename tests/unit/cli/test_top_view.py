from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from eagleray.cli.top_view import render, share_lines
from eagleray.server.dashboard.state import (
    ApiServerRow,
    DashboardState,
    EngineRow,
    EventRow,
    ExpertHeat,
    LatencySummary,
    NodeRow,
    Traffic,
)

ENGINE = EngineRow(
    rank=0,
    label="engine-0",
    state="serving",
    since=901.0,
    restarts=0,
    cause=None,
    host="node-1",
    pid=4711,
    workers=[],
    num_running=12,
    num_waiting=3,
    cache_usage=0.25,
    prompt_tokens_per_second=20_000.0,
    generation_tokens_per_second=1234.5,
)
LOST = msgspec.structs.replace(
    ENGINE, rank=1, label="engine-1.2", state="restarting", since=990.0, cause="it was killed by SIGKILL", pid=None
)
SERVER = ApiServerRow(
    index=0, label="client-0", state="serving", since=1.0, restarts=0, cause=None, pid=4712, num_in_flight=17
)
LATENCY = LatencySummary(count=10, mean=0.0314, p50=0.03, p95=1.5)
STATE = DashboardState(
    time=1000.0,
    version="1",
    instance="5ac33f10",
    model="tiny",
    server="client-0",
    state="serving",
    cause=None,
    weight_version="default",
    traffic=Traffic(
        num_in_flight=17,
        num_running=12,
        num_waiting=3,
        requests_per_second=2.5,
        prompt_tokens_per_second=20_000.0,
        generation_tokens_per_second=1234.5,
        cache_usage=0.25,
        cache_hits=None,
        time_to_first_token=LATENCY,
        time_per_output_token=LatencySummary(),
    ),
    engines=[ENGINE, LOST],
    api_servers=[SERVER],
    nodes=[NodeRow(host="node-1", engines=["engine-0"], num_workers=1, num_away=1, num_api_servers=1)],
    events=[
        EventRow(time=999.0, member="engine-1.2", kind="lost", cause="it was killed by SIGKILL", returns=True),
        EventRow(time=400.0, member="engine-1.2", kind="recovered", downtime=3.25),
        EventRow(time=390.0, member="client-9", kind="lost", cause="it left", returns=False),
        EventRow(time=300.0, member="engine-0", kind="started"),
    ],
    experts=ExpertHeat(load=[[25, 50, 100, 200, 400], [0, 0, 500, 0, 0]], balance=[0.5, 0.2]),
)


def printed(state: DashboardState, *, width: int = 120, height: int | None = None, **options) -> list[str]:
    output = io.StringIO()
    console = Console(file=output, width=width, color_system=None, highlight=False)
    console.print(render(state, options.pop("rates", []), width=width, height=height, **options))
    return output.getvalue().splitlines()


def test_render_whole_state_has_every_member_and_event():
    lines = printed(STATE)
    assert lines[0] == "eagleray tiny  serving, 1 of 2 engines, weights default"
    assert lines[1] == "tokens/s 1,234 out, 20,000 in  completions/s 2.5  in flight 17: 12 run, 3 wait"
    assert lines[2] == "first token 31 ms (p95 1.50 s)  per token – (p95 –)  cache 25 %  hits –"
    text = "\n".join(lines)
    for line in (
        "engine-0    serving 99 s         12     3   1,234  20,000   25 %  node-1 4711",
        "engine-1.2  restarting 10 s      12     3   1,234  20,000   25 %  it was killed by SIGKILL",
        "1 s ago     engine-1.2 exited: it was killed by SIGKILL; a replacement starts",
        "10 min ago  engine-1.2 serves again after 3.2 s",
        "10 min ago  client-9 exited: it left; no replacement follows",
        "12 min ago  engine-0 has started",
        "node-1      engine-0; workers: 1; away: 1",
        "client-0    serving           in flight: 17, process 4712",
        "   0  0.50 ·░▒▓█",
        "   1  0.20 ··█··",
    ):
        assert line in text, line


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (200, 60), (20, 5)])
def test_render_fits_into_the_terminal(size):
    width, height = size
    many = [msgspec.structs.replace(ENGINE, rank=rank, label=f"engine-{rank}") for rank in range(40)]
    events = [msgspec.structs.replace(STATE.events[0], cause="x" * 500)] * 100
    experts = ExpertHeat(load=[[100] * 256] * 60, balance=[1.0] * 60)
    state = msgspec.structs.replace(STATE, engines=many, events=events, experts=experts)
    lines = printed(state, width=width, height=height, rates=[1.0] * 500)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    if height >= 24:
        assert any(line.startswith("engine-0 ") for line in lines)
        assert any(line.startswith("ENGINES  (") for line in lines)
        assert any(line.startswith("EXPERTS") for line in lines)


def test_render_problem_is_a_line_above_the_others():
    assert printed(STATE, height=24, problem="trying again: the server stopped") == [
        "trying again: the server stopped",
        *printed(STATE, height=23),
    ]


def test_render_long_names_stay_apart_from_the_next_column():
    host, engine = "ip-10-0-0-1.ec2.internal", msgspec.structs.replace(ENGINE, label="engine-100.10")
    node = NodeRow(host=host, engines=["engine-0"], num_workers=1, num_away=0, num_api_servers=1)
    server = msgspec.structs.replace(SERVER, label="client-10.100")
    lines = printed(msgspec.structs.replace(STATE, nodes=[node], engines=[engine], api_servers=[server]))
    for line in (f"{host} engine-0; workers: 1", "engine-100.10 serving", "client-10.100 serving"):
        assert any(shown.startswith(line) for shown in lines), line


def test_render_members_that_start_have_no_process():
    engine = msgspec.structs.replace(ENGINE, state="starting", since=None, pid=None)
    server = msgspec.structs.replace(SERVER, state="starting", since=None, pid=None)
    text = "\n".join(printed(msgspec.structs.replace(STATE, engines=[engine], api_servers=[server])))
    assert "starting" in text and "None" not in text


@pytest.mark.parametrize("height", [None, 24])
def test_render_control_characters_of_names_and_causes_are_blanks(height):
    engine = msgspec.structs.replace(LOST, cause="a traceback:\n\x1b[31mred")
    state = msgspec.structs.replace(STATE, model="\x1b]0;title\x07", engines=[engine])
    lines = printed(state, height=height)
    assert lines[0].startswith("eagleray  ]0;title  serving")
    assert any(line.endswith("a traceback:  [31mred") for line in lines)


@given(st.integers(-5, 60), st.lists(st.integers(2, 30), min_size=1, max_size=6))
def test_share_lines_gives_no_more_than_there_is_and_no_title_alone(available, wanted):
    shared = share_lines(available, wanted)
    assert sum(shared) <= max(0, available)
    assert all(got <= most and got != 1 for got, most in zip(shared, wanted, strict=True))
    if sum(wanted) <= available:
        assert shared == wanted
