// The frame: navigation, the connection's state, keys, and the screen of the address.
import { html, render, useEffect, useState } from "./preact.js";
import { useLive, start, login, ask } from "./live.js";
import { useRoute, link, go, Dialogs, Failed } from "./parts.js";
import { Health } from "./health.js";
import { Tables, Rows } from "./tables.js";
import { Consumers, Streams } from "./queues.js";
import { PromQL, Cardinality } from "./series.js";
import { Vectors } from "./vectors.js";
import { Jobs, Cluster } from "./jobs.js";

const SCREENS = [
  ["health", "Health", "h", Health, "M3 12h4l2-6 4 12 3-9 1.5 3H21"],
  ["tables", "Tables", "t", Tables, "M4 5h16v14H4zM4 10h16M10 10v9"],
  ["rows", "Rows", "r", Rows, "M5 6h14M5 10h14M5 14h9M5 18h9"],
  ["consumers", "Consumers", "c", Consumers, "M4 12h10m0 0-4-4m4 4-4 4M18 5v14"],
  ["streams", "Streams", "s", Streams, "M3 8c3-3 6 3 9 0s6 3 9 0M3 15c3-3 6 3 9 0s6 3 9 0"],
  ["promql", "PromQL", "p", PromQL, "M4 19V5m0 14h16M7 15l4-5 3 3 5-7"],
  ["cardinality", "Cardinality", "a", Cardinality, "M4 7h16M4 12h10M4 17h5"],
  ["vectors", "Vectors", "v", Vectors, "M6 17a1.5 1.5 0 1 0 .1 0M11 8a1.5 1.5 0 1 0 .1 0M18 13a1.5 1.5 0 1 0 .1 0M16 5a1.5 1.5 0 1 0 .1 0"],
  ["jobs", "Jobs", "j", Jobs, "M4 7h9M8 12h10M6 17h6"],
  ["cluster", "Cluster", "l", Cluster, "M12 5v5m0 0-6 6m6-6 6 6M12 3.5a1.5 1.5 0 1 0 .1 0M5 17a1.5 1.5 0 1 0 .1 0M19 17a1.5 1.5 0 1 0 .1 0"],
];

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try { localStorage.setItem("penstock-theme", name); } catch { /* the choice is not kept */ }
  dispatchEvent(new Event("penstock-theme"));
}
let kept = null;
try { kept = localStorage.getItem("penstock-theme"); } catch { /* none is kept */ }
setTheme(kept || (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark"));
const turnTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

function Login() {
  const [told, tell] = useState("");
  const send = async (event) => {
    event.preventDefault();
    try { await login(event.target.elements.token.value); } catch (error) { tell(error.message); }
  };
  return html`<main class="login"><form onSubmit=${send}><img src="/console/files/icon.svg" width="56" height="56" alt="" /><h1>Penstock</h1>
    <p class="dim">The console shows what a token gives the right to see. <code>penstock console</code> prints an address with one.</p>
    <label>Token<input name="token" type="password" autocomplete="off" autofocus required /></label><button class="primary">Open</button><${Failed} error=${told || ""} /></form></main>`;
}

function Help({ onClose }) {
  return html`<div class="help" role="dialog" aria-label="Keys"><h2>Keys</h2><dl>
    ${SCREENS.map(([, name, key]) => html`<div key=${key}><dt><kbd>g</kbd> <kbd>${key}</kbd></dt><dd>${name}</dd></div>`)}
    <div><dt><kbd>/</kbd></dt><dd>to the first filter</dd></div><div><dt><kbd>↑</kbd> <kbd>↓</kbd> <kbd>Enter</kbd></dt><dd>in a table</dd></div>
    <div><dt><kbd>d</kbd></dt><dd>dark or light</dd></div><div><dt><kbd>?</kbd> <kbd>Esc</kbd></dt><dd>these keys</dd></div></dl><button onClick=${onClose}>Close</button></div>`;
}

function useKeys(help) {
  useEffect(() => {
    let before = "";
    const onKey = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") { help(false); if (document.activeElement) document.activeElement.blur(); return; }
      if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
      const screen = before === "g" && SCREENS.find(([, , key]) => key === event.key);
      before = event.key;
      if (screen) { go(screen[0]); before = ""; }
      else if (event.key === "?") help((old) => !old);
      else if (event.key === "d") turnTheme();
      else if (event.key === "/") { const to = document.querySelector("main input, main select"); if (to) { event.preventDefault(); to.focus(); } }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}

function App() {
  const live = useLive(), route = useRoute();
  const [asked, help] = useState(false);
  useKeys(help);
  const [name] = route.path.split("/");
  const screen = SCREENS.find(([one]) => one === name) || SCREENS[0];
  useEffect(() => { document.title = `${screen[1]} · Penstock`; }, [screen]);
  if (live.needsToken) return html`<${Login} />`;
  if (!live.hello) return html`<main class="login">${live.error ? html`<${Failed} error=${live.error} />` : html`<p class="dim">connecting …</p>`}</main>`;
  const last = live.last;
  const wrong = live.error || (last && (last.store.error || last.troubles.length || last.tables.some((one) => one.state === "paused" || one.state === "frozen")));
  const busy = last && last.tables.some((one) => one.state === "throttled");
  const word = !live.connected ? "not connected" : wrong ? "needs attention" : busy ? "under pressure" : "healthy";
  return html`<div class="frame"><a class="skip" href="#screen" onClick=${(event) => { event.preventDefault(); document.getElementById("screen").focus(); }}>to the screen</a>
    <header class="top"><a class="brand" href="#/health"><img src="/console/files/icon.svg" width="26" height="26" alt="" /><b>Penstock</b></a>
      <span class="storename" title=${live.hello.store}>${live.hello.store}</span>
      <span class=${"pill " + (!live.connected ? "off" : wrong ? "bad" : busy ? "warn" : "good")} role="status"><i></i>${word}</span><span class="spring"></span>
      <span class="dim wide">${live.hello.write ? "may write" : "read-only"} · ${live.hello.version}</span>
      <button class="icon" onClick=${turnTheme} title="dark or light (d)" aria-label="dark or light">◐</button><button class="icon" onClick=${() => help(!asked)} title="keys (?)" aria-label="keys">?</button>
      ${live.hello.sessions && live.hello.client !== "" && html`<button class="icon wide" title="end the session" aria-label="end the session" onClick=${async () => { await ask("/console/api/logout", { method: "POST" }); location.reload(); }}><svg viewBox="0 0 24 24" width="18" height="18" aria-hidden="true"><path d="M10 4H5v16h5M14 8l4 4-4 4M18 12H9" /></svg></button>`}</header>
    <nav aria-label="screens">${SCREENS.map(([one, title, key, , path]) => html`<a key=${one} href=${link(one)} aria-current=${one === screen[0] ? "page" : undefined} title=${`g ${key}`}>
      <svg viewBox="0 0 24 24" width="18" height="18" aria-hidden="true"><path d=${path} /></svg><span>${title}</span></a>`)}</nav>
    <main id="screen" tabindex="-1">${live.error && html`<${Failed} error=${live.error} />`}<${screen[3]} live=${live} route=${route} /></main>
    <${Dialogs} />${asked && html`<${Help} onClose=${() => help(false)} />`}</div>`;
}

render(html`<${App} />`, document.body);
start();
