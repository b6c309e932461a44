"""How the console's page keeps in touch with its server: `live.js`, run by Node with a server of the test's own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.http import console

driver = pytest.importorskip("playwright._impl._driver", reason="Node comes with Playwright")
LIVE = Path(console.__file__).parent / "console_files" / "live.js"
# What a browser has: one page, a clock that stands still, and answers that the test gives.
BROWSER = """
export const streams = [], timers = [];
export const answers = { hello: () => ({ status: 200, body: { data: { tables: [] } } }) };
globalThis.location = { hash: "", pathname: "/console/" };
globalThis.setTimeout = (act, ms) => timers.push({ act, ms });
globalThis.clearTimeout = () => {};
globalThis.fetch = async (path) => {
  const { status, body } = answers[path.split("/").pop()]();
  return { status, ok: status === 200, json: async () => body };
};
globalThis.EventSource = class {
  static CLOSED = 2;
  constructor() { this.readyState = 1; this.on = {}; streams.push(this); }
  addEventListener(name, act) { this.on[name] = act; }
  close() { this.readyState = 2; }
  send(name, data) { this.on[name]({ data: JSON.stringify(data) }); }
  end(readyState) { this.readyState = readyState; this.onerror(); }
};
"""


def played(tmp_path: Path, script: str) -> Any:
    """Return what a script prints as JSON."""
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "preact.js").write_text("export const useState = () => [], useEffect = () => {};")
    (tmp_path / "browser.js").write_text(BROWSER)
    (tmp_path / "live.js").write_text(LIVE.read_text())
    head = 'import { streams, timers, answers } from "./browser.js";\nimport { state, start } from "./live.js";\n'
    (tmp_path / "play.js").write_text(f"{head}const said = [];\n{script}\nconsole.log(JSON.stringify(said));")
    node = str(driver.compute_driver_executable()[0])
    ended = subprocess.run([node, "play.js"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, b""), ended
    return json.loads(ended.stdout)


def test_a_page_that_is_refused_tries_again(tmp_path: Path) -> None:
    """A browser reconnects after a cut, but never after an answer such as 503: then the page has to."""
    states = played(
        tmp_path,
        """
        await start();
        streams[0].end(0);  // cut: the browser reconnects by itself
        said.push([state.connected, streams.length, timers.length]);
        streams[0].end(2);  // refused
        said.push([state.connected, timers.length, state.error]);
        await timers[0].act();
        streams[1].send("history", []);
        said.push([state.connected, streams.length, state.error]);
        """,
    )
    message = "the server sends this page no samples: too many may be open; trying again"
    assert states == [[False, 1, 0], [False, 1, message], [True, 2, ""]]


def test_a_server_that_began_anew_asks_for_the_token(tmp_path: Path) -> None:
    states = played(
        tmp_path,
        """
        await start();
        streams[0].end(2);
        answers.hello = () => ({ status: 503, body: { error: "no owner" } });
        await timers[0].act();
        said.push([state.needsToken, state.error, timers.length]);
        answers.hello = () => ({ status: 401, body: { error: "a token is needed" } });
        await timers[1].act();
        said.push([state.needsToken, timers.length]);
        """,
    )
    assert states == [[False, "no owner; trying again", 2], [True, 2]]


def test_a_clock_that_is_set_back_stops_no_page(tmp_path: Path) -> None:
    states = played(
        tmp_path,
        """
        await start();
        const sample = (t) => streams[0].send("sample", { t, store: {} });
        streams[0].send("history", [{ t: 100, store: {} }]);
        for (const t of [100, 101, 40, 41]) { sample(t); said.push(state.samples.map((one) => one.t)); }
        """,
    )
    assert states == [[100], [100, 101], [40], [40, 41]]
