"""The console in a real browser, on a store that is written to: every screen, its values, keys, and what it refuses.

One browser, one page, one store. Pictures of every screen are kept in build/console.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browsers import launched
from console_stores import SCRIPT, fill, tokens
from test_console_api import Door

import penstock
from penstock.http.application import HttpSettings
from penstock.http.console import ConsoleSettings
from penstock.http.serving import serve_http

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
PICTURES = Path(__file__).parents[3] / "build" / "console"
SCREENS = {
    "health": "The way of a write", "tables": "Bytes of all tables", "rows": "user-000", "consumers": "billing",
    "streams": "Dead letters in dead", "promql": "Tab completes", "cardinality": "Series of each metric",
    "vectors": "Nearest", "jobs": "Timeline", "cluster": "one copy",
}  # fmt: skip


@contextmanager
def load(store: Any) -> Iterator[None]:
    """Write to a store meanwhile."""
    ended = threading.Event()

    def write() -> None:
        table, number = store.kv("busy"), 0
        while not ended.wait(0.02):
            table.put_many({b"%08d" % (number * 50 + each): bytes(100) for each in range(50)})
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(10)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with penstock.open(tmp_path_factory.mktemp("browser") / "store") as owner:
        fill(owner)
        with load(owner):
            yield owner


@pytest.fixture(scope="module")
def door(store: Any) -> Iterator[Door]:
    settings = HttpSettings(rights_of=tokens().rights_of, loopback=True, console=ConsoleSettings(write=True))
    with penstock.connect(store.path) as connected, serve_http(connected, settings) as port:
        yield Door(port)


class Watched:
    """A page, and what it does that it should not."""

    def __init__(self, page: Any, port: int) -> None:
        self.page = page
        self.base = f"http://127.0.0.1:{port}/"
        self.wrong: list[str] = []
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("console", self._note_message)
        page.on("request", self._note_request)

    def _note_message(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"said: {message.text}")

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith(self.base):
            self.wrong.append(f"request: {request.url}")

    def go(self, path: str, text: str) -> None:
        self.page.evaluate("path => { location.hash = '#/' + path }", path)
        self.page.get_by_text(text, exact=False).first.wait_for(timeout=8_000)

    def until(self, check: Callable[[], bool]) -> None:
        """Wait for something that the page does by itself."""
        for _ in range(400):
            if check():
                return
            self.page.wait_for_timeout(20)  # Playwright tells us what happened only while we wait in it
        raise AssertionError("the page did not get there")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.inner_text())


@pytest.fixture(scope="module")
def watched(door: Door) -> Iterator[Watched]:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_api.sync_playwright() as playwright:
        browser = launched(playwright)
        page = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="dark").new_page()
        watched = Watched(page, door.port)
        page.goto(f"{watched.base}console/#token=admin")
        page.get_by_text("The way of a write").wait_for()
        yield watched
        browser.close()


def number(text: str) -> int:
    return int("".join(each for each in text if each.isdigit()))


def test_every_screen_in_dark_in_light_and_on_a_phone(watched: Watched) -> None:
    page = watched.page
    assert "token" not in page.url  # it does not stay in the address
    for name, text in SCREENS.items():
        watched.go("rows?table=users" if name == "rows" else name, text)
        page.screenshot(path=PICTURES / f"{name}.png")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    watched.go("health", SCREENS["health"])
    page.screenshot(path=PICTURES / "health-light.png")
    page.set_viewport_size({"width": 390, "height": 844})
    for name in ("health", "tables", "rows", "jobs", "vectors"):
        watched.go("rows?table=users" if name == "rows" else name, SCREENS[name])
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        page.screenshot(path=PICTURES / f"{name}-phone.png")
    page.set_viewport_size({"width": 1440, "height": 900})
    page.keyboard.press("d")
    assert watched.wrong == []


def test_what_the_page_shows_is_what_the_api_says(watched: Watched, door: Door, store: Any) -> None:
    page = watched.page
    watched.go("health", SCREENS["health"])
    low = door.read("sample")["store"]["writes"]
    watched.until(lambda: number(watched.text("#writes-total")) >= low)
    watched.until(lambda: number(watched.text("#writes-total")) > low)  # it moves
    total = number(watched.text("#writes-total"))
    assert low <= total <= store.statistics().writes
    watched.go("consumers", "billing")
    lag = next(entry["lag"] for entry in door.read("sample")["consumers"] if entry["name"] == "billing")
    assert number(watched.text('[data-lag="events/billing"]')) == lag == store.queue("events").lag("billing")
    watched.go("streams", "duplicates refused")
    stream = next(entry["stream"] for entry in door.read("sample")["consumers"] if entry["name"] == "spark")
    assert stream == {"batches": 2, "rows_in": 100, "rows_out": 94, "dead": 6, "duplicates": 1}
    (statistics,) = [entry.stream for entry in store.queue("events").consumers() if entry.name == "spark"]
    for name, count in stream.items():
        assert number(watched.text(f'[data-stream="events/spark/{name}"]')) == count == getattr(statistics, name)
    watched.go("cardinality?table=metrics", "Series of each metric")
    watched.until(
        lambda: number(watched.text("#series-total")) == door.read("cardinality?table=metrics")["series"] == 3
    )
    watched.go("tables", "users")
    sizes = {entry["name"]: entry["rows"] for entry in door.read("sample")["tables"]}
    row = page.locator("tbody tr", has_text="blobs").first
    assert number(row.locator('[data-name="rows"]').inner_text()) == sizes["blobs"]
    watched.go("rows?table=users&key=" + b"user-007".hex(), '"number": 7')
    assert '"name": "user 7"' in watched.text(".detail pre")
    watched.go("rows?table=blobs&key=00ff01", "0x00ff01")
    assert "ff 00 62 69" in watched.text(".detail pre")
    watched.go("vectors?table=docs&like=doc-7&k=3", "Nearest")
    hits = [hit["id"] for hit in door.read("neighbours?table=docs&like=doc-7&k=3")["hits"]]
    watched.until(lambda: page.locator('table [data-name="id"]').all_inner_texts() == hits)
    assert watched.wrong == []


def test_scripts_in_data_are_text(watched: Watched) -> None:
    page = watched.page
    watched.go("rows?table=users&key=" + SCRIPT.encode().hex(), "LSN")
    assert SCRIPT in watched.text(".detail h2")
    assert SCRIPT in watched.text(".detail pre")
    watched.go("rows?table=events&contains=pwned", "payload")
    watched.until(lambda: SCRIPT in page.locator('[data-name="payload"]').all_inner_texts())
    assert SCRIPT in page.locator('[data-name="key"]').all_inner_texts()
    watched.go("cardinality?table=metrics&label=host", "Values of host")
    watched.until(lambda: SCRIPT in page.locator(".chip").all_inner_texts())
    watched.go("promql?table=metrics&q=cpu&form=table", "3 series")
    assert any("onerror" in text for text in page.locator('[data-name="series"]').all_inner_texts())
    watched.go("promql?table=metrics&q=cpu&form=graph", "3 series")
    watched.until(lambda: any("onerror" in text for text in page.locator(".legend").all_inner_texts()))
    watched.go("streams", "Dead letters in dead")
    assert SCRIPT in page.locator(".reason").all_inner_texts()
    assert SCRIPT in page.locator(".panel h2").all_inner_texts()  # the name of a consumer
    watched.go("rows?table=" + "%3Cscript%3E", "key begins with")
    assert page.evaluate("window.pwned") is None
    assert watched.wrong == []


def test_it_is_used_by_keyboard(watched: Watched) -> None:
    page = watched.page
    watched.go("health", SCREENS["health"])
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.get_by_role("heading", name="Tables", level=1).wait_for()
    page.locator("tbody tr").first.focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.rowIndex") == 2
    page.keyboard.press("Enter")
    page.get_by_text("Columns").wait_for()
    page.keyboard.press("g")
    page.keyboard.press("p")
    page.get_by_role("heading", name="PromQL", level=1).wait_for()
    page.keyboard.press("/")
    page.locator("#promql").focus()
    page.locator("#promql").fill("")
    page.locator("#promql").press_sequentially("cp")
    page.locator("#completions li", has_text="cpu").wait_for()
    page.keyboard.press("Tab")
    assert page.locator("#promql").input_value() == "cpu"
    page.keyboard.press("Enter")
    page.get_by_text("3 series").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog", name="Keys").wait_for(state="detached")
    assert watched.wrong == []


def test_a_button_that_changes_something_asks_first(watched: Watched, store: Any) -> None:
    page, events = watched.page, store.queue("events")
    watched.go("streams", "Dead letters in dead")
    before = events.statistics().messages
    button = page.get_by_role("button", name="Put back").first
    button.click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    assert events.statistics().messages == before
    for reply in ("and durable", "it was put back before"):
        button.click()
        page.get_by_role("dialog").get_by_role("button", name="Put back").click()
        page.get_by_text(reply, exact=False).first.wait_for()
        assert events.statistics().messages == before + 1
    assert watched.wrong == []


def test_the_watch_and_the_policy_work(watched: Watched) -> None:
    """The controls: what the other tests rely on to be noticed is noticed, and what gets into the page does not run."""
    page = watched.page
    page.evaluate("setTimeout(() => { throw new Error('control') })")
    watched.until(lambda: any("control" in entry for entry in watched.wrong))
    page.evaluate("fetch('http://127.0.0.1:1/').catch(() => {})")
    watched.until(lambda: any("connect-src" in entry or "127.0.0.1:1" in entry for entry in watched.wrong))
    page.evaluate("""markup => {
        document.body.insertAdjacentHTML("beforeend", markup);
        const script = document.createElement("script");
        script.textContent = "window.pwned = 2";
        document.body.append(script);
    }""", SCRIPT)  # fmt: skip
    watched.until(lambda: sum("script-src" in entry for entry in watched.wrong) >= 2)
    assert page.evaluate("window.pwned") is None
    watched.wrong.clear()
