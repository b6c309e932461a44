// PromQL with completion, history, table and graph; and cardinality.
import { html, useState, useEffect, useMemo, useRef } from "./preact.js";
import { read, promql, ask, whole, short, clock } from "./live.js";
import { Chart, Table, Panel, Failed, Pick, Bars, useLoad, link, go } from "./parts.js";

const FUNCTIONS = "sum avg min max count stddev topk bottomk quantile count_values rate irate increase delta deriv predict_linear histogram_quantile avg_over_time min_over_time max_over_time sum_over_time count_over_time last_over_time quantile_over_time abs absent ceil floor round clamp clamp_min clamp_max exp ln log2 log10 sqrt label_replace label_join sort sort_desc time timestamp vector scalar changes resets by without offset bool and or unless on ignoring group_left group_right".split(" ");
const RANGES = { "5 min": 300, "15 min": 900, "1 h": 3600, "6 h": 21600, "1 d": 86400, "7 d": 604800, "30 d": 2592000 };
const LINES_MAX = 24;
const kept = () => { try { return JSON.parse(localStorage.getItem("penstock-promql") || "[]"); } catch { return []; } };
const keep = (text) => { const list = [text, ...kept().filter((one) => one !== text)].slice(0, 30); try { localStorage.setItem("penstock-promql", JSON.stringify(list)); } catch { /* the history is not kept */ } return list; };
const seriesName = (metric) => { const { __name__: name = "", ...rest } = metric; const labels = Object.entries(rest).map(([k, v]) => `${k}="${v}"`).join(", "); return labels ? `${name}{${labels}}` : name || "value"; };

const seriesTables = (live) => (live.last?.tables || live.hello.tables).filter((one) => one.kind === "series").map((one) => one.name);

export function PromQL({ live, route }) {
  const tables = seriesTables(live), given = route.given;
  const table = tables.includes(given.table) ? given.table : tables[0];
  if (!table) return html`<h1>PromQL</h1><p class="empty">there is no series table yet</p>`;
  return html`<h1>PromQL</h1><${Query} key=${table} table=${table} tables=${tables} given=${given} />`;
}

function Query({ table, tables, given }) {
  const range = given.range in RANGES ? given.range : "1 h", form = given.form || "graph";
  const [metrics, setMetrics] = useState([]), [labels, setLabels] = useState([]);
  const [text, write] = useState(given.q || ""), [history, setHistory] = useState(kept());
  const [result, setResult] = useState(null), [error, fail] = useState(""), [busy, work] = useState(false);
  const [choice, choose] = useState(-1), [closed, close] = useState(true);
  const input = useRef(null), touched = useRef(false);
  useEffect(() => {
    ask(`/prometheus/${encodeURIComponent(table)}/api/v1/label/__name__/values`).then(setMetrics, (e) => fail(e.message));
    ask(`/prometheus/${encodeURIComponent(table)}/api/v1/labels`).then(setLabels, () => {});
  }, [table]);
  useEffect(() => { if (!given.q && metrics.length && !text && !touched.current) write(metrics[0]); }, [metrics]);
  const run = async (q, at = range, how = form) => {
    if (!q.trim()) return;
    work(true); fail("");
    const end = given.end ? Number(given.end) : Date.now() / 1000, seconds = RANGES[at];
    try {
      const data = how === "graph" ? await promql(table, "query_range", { query: q, start: String(end - seconds), end: String(end), step: String(Math.max(1, Math.ceil(seconds / 300))) }) : await promql(table, "query", { query: q, time: String(end) });
      setResult({ ...data, how }); setHistory(keep(q));
    } catch (e) { fail(e.message); setResult(null); }
    work(false);
  };
  useEffect(() => { if (given.q) { write(given.q); run(given.q); } }, [given.q, range, form, given.end]);
  const send = (q = text) => { close(true); if (q === given.q) run(q); else go("promql", { table, q, range, form, end: given.end }); };
  const word = /[\w:]*$/.exec(text)[0];
  const found = useMemo(() => (word.length < 1 ? [] : [...metrics.map((m) => [m, "metric"]), ...labels.filter((l) => l !== "__name__").map((l) => [l, "label"]), ...FUNCTIONS.map((f) => [f, "function"])].filter(([name]) => name.startsWith(word) && name !== word).slice(0, 8)), [word, metrics, labels]);
  const open = !closed && found.length > 0;
  const take = (name) => { write(text.slice(0, text.length - word.length) + name); choose(-1); close(true); input.current.focus(); };
  const onKey = (event) => {
    if (open && (event.key === "ArrowDown" || event.key === "ArrowUp")) { event.preventDefault(); choose((choice + (event.key === "ArrowDown" ? 1 : found.length)) % found.length); }
    else if (open && (event.key === "Tab" || (event.key === "Enter" && choice >= 0))) { event.preventDefault(); take(found[Math.max(0, choice)][0]); }
    else if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); }
    else if (event.key === "Escape" && open) { close(true); event.stopPropagation(); }
  };
  return html`<${Panel}><div class="row"><${Pick} label="table" value=${table} options=${tables} onChange=${(name) => go("promql", { table: name })} />
      <label class="grow complete">expression<input ref=${input} id="promql" role="combobox" aria-expanded=${open} aria-controls="completions" autocomplete="off" spellcheck="false" value=${text} onInput=${(event) => { touched.current = true; write(event.target.value); close(false); choose(-1); }} onKeyDown=${onKey} onFocus=${() => { touched.current = true; }} onBlur=${() => setTimeout(() => close(true), 150)} placeholder="rate(requests_total[5m])" />
        ${open && html`<ul id="completions" role="listbox">${found.map(([name, kind], i) => html`<li key=${name} role="option" aria-selected=${i === choice} class=${i === choice ? "on" : ""} onMouseDown=${(event) => { event.preventDefault(); take(name); }}><span>${name}</span><em>${kind}</em></li>`)}</ul>`}</label>
      <${Pick} label="range" value=${range} options=${Object.keys(RANGES)} onChange=${(some) => go("promql", { table, q: text, range: some, form, end: given.end })} />
      <button class="primary" disabled=${busy} onClick=${() => send()}>${busy ? "…" : "Run"}</button></div>
    <div class="row tight" role="tablist">${["graph", "table"].map((name) => html`<button key=${name} role="tab" class=${"tab" + (form === name ? " on" : "")} aria-selected=${form === name} onClick=${() => go("promql", { table, q: text, range, form: name, end: given.end })}>${name}</button>`)}
      ${history.length > 0 && html`<label class="quiet">history<select value="" onChange=${(event) => { if (event.target.value) { write(event.target.value); send(event.target.value); } }}><option value="">${history.length} expressions</option>${history.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>`}</div>
    <${Failed} error=${error} />${result && html`<${Result} result=${result} />`}${!result && !error && html`<p class="empty">${busy ? "computing …" : `${whole(metrics.length)} metrics. Enter runs, Tab completes.`}</p>`}<//>`;
}

function Result({ result }) {
  const all = result.result, type = result.resultType;
  const matrix = useMemo(() => {
    if (type !== "matrix") return null;
    const lines = all.slice(0, LINES_MAX), t = [...new Set(lines.flatMap((one) => one.values.map(([at]) => at)))].sort((a, b) => a - b), place = new Map(t.map((at, i) => [at, i]));
    return { t, series: lines.map((one) => { const y = new Array(t.length).fill(null); one.values.forEach(([at, v]) => { const n = Number(v); y[place.get(at)] = Number.isFinite(n) ? n : null; }); return { name: seriesName(one.metric), y, fill: lines.length === 1 ? undefined : false }; }) };
  }, [result]);
  if (type === "scalar" || type === "string") return html`<p class="figure">${all[1]}</p>`;
  if (!all.length) return html`<p class="empty">no samples in this range</p>`;
  const note = html`<p class="dim">${whole(all.length)} series${type === "matrix" && all.length > LINES_MAX ? `, the first ${LINES_MAX} drawn` : ""}</p>`;
  if (matrix) return html`<${Chart} t=${matrix.t} series=${matrix.series} format=${short} height=${320} zoom=${true} />${note}`;
  const rows = all.map((one, i) => ({ id: i, name: seriesName(one.metric), at: one.value ? one.value[0] : null, value: one.value ? one.value[1] : "" }));
  return html`<${Table} label="result" rows=${rows.slice(0, 1000)} columns=${[{ name: "series", mono: true, show: (one) => one.name, sort: (one) => one.name }, { name: "time (UTC)", mono: true, show: (one) => clock(one.at) }, { name: "value", right: true, mono: true, show: (one) => one.value, sort: (one) => Number(one.value) }]} />${note}`;
}

export function Cardinality({ live, route }) {
  const tables = seriesTables(live), given = route.given, table = tables.includes(given.table) ? given.table : tables[0];
  if (!table) return html`<h1>Cardinality</h1><p class="empty">there is no series table yet</p>`;
  const { data, error } = useLoad(() => read("cardinality", { table, label: given.label }), [table, given.label]);
  return html`<h1>Cardinality</h1><${Panel}><div class="row"><${Pick} label="table" value=${table} options=${tables} onChange=${(name) => go("cardinality", { table: name })} />${data && html`<p class="figure"><b id="series-total">${whole(data.series)}</b> series</p>`}</div><${Failed} error=${error} /><//>
    ${data && html`<div class="grid2"><${Panel} title="Series of each metric"><${Bars} rows=${data.metrics} onPick=${(name) => go("promql", { table, q: name })} /><//>
      <${Panel} title="Values of each label"><${Bars} rows=${data.labels} picked=${given.label} onPick=${(name) => go("cardinality", { table, label: name })} /><//>
      ${data.values && html`<${Panel} title=${`Values of ${given.label}`} side=${html`<span class="dim">${whole(data.values.length)} of ${whole(data.values_total)}</span>`}><div class="chips">${data.values.map((one) => html`<a key=${one} class="chip" href=${link("promql", { table, q: `{${given.label}=${JSON.stringify(one)}}` })}>${one}</a>`)}</div><//>`}</div>`}`;
}
