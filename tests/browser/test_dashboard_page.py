"""The live page in a headless Chromium, against a server with two engines, two API servers and experts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading

import httpx
import pytest
from checkpoints import make_checkpoint
from serving import serve

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra `browser`")
expect = sync_api.expect

KEY = "sesame"
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}
SECONDS = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_moe")
    options = ("--data-parallel-size", "2", "--api-server-count", "2", "--api-key", KEY, "--served-model-name", "tiny")
    with serve(str(checkpoint), *options) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "no Chromium: install the package chromium, or name the program by the variable CHROMIUM"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page of a phone. Fails at its end if a script failed or the policy of the page kept anything from it."""
    context = browser.new_context(viewport=PHONE)
    context.set_default_timeout(1000 * SECONDS)
    expect.set_options(timeout=1000 * SECONDS)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if "Content Security" in message.text else None)
    yield page
    context.close()
    assert errors == []


@pytest.fixture
def root(server):
    return server.url.removesuffix("/v1")


@pytest.fixture
def live(page, root):
    """The page with its key, connected."""
    page.goto(f"{root}/dashboard")
    enter_key(page, KEY)
    page.wait_for_selector("#connection.live")
    expect(page.locator("#engines > .serving")).to_have_count(2)
    return page


def enter_key(page, key):
    page.fill("#key", key)
    page.click("#key-form button")


def state(root):
    return request(root, "GET", "/dashboard/state")


def generate(root):
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 50, "ignore_eos": True}
    request(root, "POST", "/v1/completions", json=body)


def request(root, method, path, **options):
    headers = {"X-API-Key": KEY}
    response = httpx.request(method, root + path, headers=headers, timeout=SECONDS, trust_env=False, **options)
    return response.raise_for_status().json()


def texts(page, selector):
    return page.eval_on_selector_all(selector, "nodes => nodes.map((node) => node.textContent)")


def test_page_asks_for_the_key_and_sends_it_as_a_header_to_its_own_server_only(page, root):
    requests = []
    page.on("request", lambda request: requests.append(request))
    page.goto(f"{root}/dashboard")
    page.wait_for_selector("#key-form", state="visible")
    assert not page.is_visible("#state")
    enter_key(page, "wrong – ключ")
    expect(page.locator("#key-error")).to_have_text("The server does not take this key.")
    enter_key(page, KEY)
    page.wait_for_selector("#state", state="visible")
    assert not page.is_visible("#key-form")
    page.reload()
    page.wait_for_selector("#state", state="visible")
    urls = [request.url for request in requests if not request.url.startswith("data:")]
    assert {re.sub(r"^" + root, "", url) for url in urls} == {"/dashboard", "/dashboard/state"}
    assert requests[-1].headers["authorization"] == f"Bearer {KEY}"


def test_page_shows_engines_servers_and_traffic(live, root):
    done = threading.Event()

    def load():
        while not done.is_set():
            generate(root)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        expect(live.locator("#tiles b").first).to_have_text(re.compile("[1-9]"))
        expect(live.locator("#tiles .line").first).to_have_attribute("d", re.compile("L"))
    finally:
        done.set()
        thread.join()
    shown = state(root)
    assert texts(live, "#engines .name") == [engine["label"] for engine in shown["engines"]]
    for engine, place in zip(shown["engines"], texts(live, "#engines .where"), strict=True):
        assert place.startswith(f"{engine['host']} · process {engine['pid']}")
    assert texts(live, "#servers td:nth-child(3)") == [str(server["pid"]) for server in shown["api_servers"]]
    assert texts(live, "#nodes td:first-child") == [node["host"] for node in shown["nodes"]]


def test_page_shows_a_kill_and_the_recovery(live, root):
    victim = state(root)["engines"][1]
    os.kill(victim["pid"], signal.SIGKILL)
    live.wait_for_selector("#engines > [data-key='1'].restarting")
    assert "SIGKILL" in live.text_content("#engines > [data-key='1'] .cause")
    assert live.title().startswith("1 of 2 engines")
    live.wait_for_selector("#engines > [data-key='1'].serving")
    recovered, lost = live.text_content("#events > .recovered"), live.text_content("#events > .lost")
    assert "serves again" in recovered
    assert f"{victim['label']} exited: it was killed by SIGKILL" in lost


def test_page_connects_to_another_server_when_its_own_is_killed(live, root):
    """Whichever of the two API servers has the stream is among the killed."""
    before = state(root)["api_servers"]
    for server in before:
        os.kill(server["pid"], signal.SIGKILL)
    for server in before:
        row = f"#servers > tr[data-key='client-{server['index']}.{server['restarts'] + 1}']"
        expect(live.locator(row)).to_contain_text("serving")
    live.wait_for_selector("#connection.live")
    exits = texts(live, "#events > .lost")
    assert all(any(f"{server['label']} exited" in text for text in exits) for server in before)


def test_page_heat_map_cell_is_chosen_by_keys(live, root):
    generate(root)  # the experts are reported when it has ended
    live.wait_for_selector("#experts", state="visible")
    live.focus("#heat-box")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowUp"):
        live.keyboard.press(key)
    assert re.match(r"Layer 0, expert 1: \d+ % of the layer's mean", live.text_content("#heat-cell"))
    assert live.is_visible("#heat-cursor")
    live.click("#layers summary")
    num_layers = live.evaluate("document.querySelector('#heat').height")
    assert num_layers > 0
    expect(live.locator("#layer-rows td:first-child")).to_have_count(num_layers)


@pytest.mark.parametrize("size", [{"width": 320, "height": 600}, PHONE, DESKTOP], ids=lambda size: str(size["width"]))
def test_page_fits_the_width_of_the_screen(live, size):
    live.set_viewport_size(size)
    assert live.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_page_is_light_or_dark_and_readable_in_both(live):
    backgrounds = []
    for scheme in ("light", "dark"):
        live.emulate_media(color_scheme=scheme)
        colors = live.evaluate(
            """() => ["--text", "--quiet", "--good", "--bad", "--accent", "--card"].map(
                 (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim())"""
        )
        *texts, background = [luminance(color) for color in colors]
        backgrounds.append(background)
        contrasts = [(max(text, background) + 0.05) / (min(text, background) + 0.05) for text in texts]
        assert min(contrasts) >= 4.5
    assert backgrounds[0] > 0.5 > backgrounds[1]


def luminance(color: str) -> float:
    """Return the relative luminance of a colour, as the guidelines for accessible web content define it."""
    color = color.removeprefix("#")
    digits = "".join(2 * digit for digit in color) if len(color) == 3 else color
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def answer_requests(page, *answers):
    """Answer the requests for states with these lists of states, one after the other; those of None get no answer.
    Refuse further requests."""
    remaining = list(answers)

    def answer(route):
        if not remaining:
            route.abort()
        elif (states := remaining.pop(0)) is not None:
            body = "".join(f"data: {json.dumps(one)}\n\n" for one in states)
            route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/dashboard/state", answer)


def test_page_that_was_hidden_while_its_server_went_connects_when_it_is_shown(page, root):
    first = state(root)
    page.add_init_script("Object.defineProperty(document, 'hidden', { get: () => window.isShown !== true })")
    answer_requests(page, [first])
    with page.expect_event("requestfailed"):
        page.goto(f"{root}/dashboard")
    page.unroute("**/dashboard/state")
    answer_requests(page, [first | {"model": "newer"}])
    page.evaluate("() => { window.isShown = true; document.dispatchEvent(new Event('visibilitychange')); }")
    expect(page.locator("#model")).to_have_text("newer")


def test_page_server_that_does_not_answer_is_asked_again(page, root):
    page.clock.install()
    answer_requests(page, None, [state(root)])
    page.goto(f"{root}/dashboard")
    page.clock.run_for(12_000)
    expect(page.locator("#state")).to_be_visible()


def test_page_restarted_server_has_no_experts_and_no_curve_of_another(page, root):
    """The clock of the new one is an hour behind."""
    first = state(root) | {"experts": {"load": [[150, 50]], "balance": [0.67]}}
    restarted = first | {"instance": "other", "time": first["time"] - 3600, "experts": None}
    answer_requests(page, [first, first | {"time": first["time"] + 1, "experts": None}, restarted])
    page.goto(f"{root}/dashboard")
    expect(page.locator("#instance")).to_contain_text("instance other")
    assert not page.is_visible("#experts")
    assert "L" not in page.get_attribute("#tiles li:nth-child(2) .line", "d")


def test_page_texts_of_the_server_are_no_markup(page, root):
    markup = "<img src=x onerror=fail()>"
    first = state(root)
    engine = first["engines"][0] | {"label": markup, "cause": markup, "host": markup}
    event = {"time": 1.0, "member": markup, "kind": "lost", "cause": markup, "returns": True, "downtime": None}
    node = first["nodes"][0] | {"host": markup}
    named = {"model": markup, "instance": markup, "engines": [engine], "events": [event], "nodes": [node]}
    answer_requests(page, [first | named])
    page.goto(f"{root}/dashboard")
    expect(page.locator("#model")).to_have_text(markup)
    assert page.locator("img").count() == 0


def test_page_does_not_grow_with_the_number_of_states(page, root):
    """There is an exit in every state. Later states take the place of earlier ones."""
    states = states_after(state(root), 900)
    answer_requests(page, states)
    page.goto(f"{root}/dashboard")
    page.wait_for_selector(f"#events > li[data-key^='{states[-1]['time']!r} ']")
    assert len(texts(page, "#events > li")) == 100
    curve = page.get_attribute("#tiles .line", "d")
    assert 200 < curve.count("L") <= 310


def states_after(first, count):
    """Return the states of as many seconds, each with the exits of the last hundred of them."""
    exit_ = {"member": "engine-0", "kind": "lost", "cause": "x", "returns": True, "downtime": None}
    exits = [{**exit_, "time": first["time"] + second} for second in range(count)]
    return [
        first
        | {
            "time": exits[second]["time"],
            "events": exits[max(0, second - 99) : second + 1][::-1],
            "traffic": first["traffic"] | {"generation_tokens_per_second": float(second % 7)},
            "experts": None,
        }
        for second in range(count)
    ]
