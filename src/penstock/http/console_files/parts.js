// Parts of screens: charts, tables, payloads, dialogs. Data enter the document as text only.
import { html, useState, useEffect, useRef, useLayoutEffect, useMemo } from "./preact.js";
import { fromBase64, asText, toHex, bytes, whole, act } from "./live.js";

export const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function useRoute() {
  const [hash, set] = useState(location.hash);
  useEffect(() => {
    const one = () => set(location.hash);
    addEventListener("hashchange", one);
    return () => removeEventListener("hashchange", one);
  }, []);
  const [path, text] = hash.replace(/^#\/?/, "").split("?");
  return { path: path || "health", given: Object.fromEntries(new URLSearchParams(text || "")) };
}
export const link = (path, given = {}) => {
  const text = new URLSearchParams(Object.entries(given).filter(([, v]) => v !== "" && v != null)).toString();
  return `#/${path}${text ? "?" + text : ""}`;
};
export const go = (path, given) => { location.hash = link(path, given); };

export function useLoad(load, keys) {
  const [result, set] = useState({ loading: true });
  const [again, turn] = useState(0);
  useEffect(() => {
    let gone = false;
    set((old) => ({ ...old, loading: true }));
    load().then((data) => gone || set({ data }), (error) => gone || set({ error: error.message }));
    return () => { gone = true; };
  }, [...keys, again]);
  return { ...result, reload: () => turn((n) => n + 1) };
}

// -- charts

const two = (n) => String(n).padStart(2, "0");
function moment(s, step) {
  const d = new Date(s * 1000), time = `${two(d.getHours())}:${two(d.getMinutes())}`;
  if (step >= 86400) return `${two(d.getDate())}.${two(d.getMonth() + 1)}.`;
  return step < 60 ? `${time}:${two(d.getSeconds())}` : step >= 21600 ? `${two(d.getDate())}.${two(d.getMonth() + 1)}. ${time}` : time;
}

export function Chart({ t, series, format = String, height = 200, zoom = false, label }) {
  const place = useRef(null), plot = useRef(null);
  const [hidden, hide] = useState({});
  const [at, point] = useState(null);
  const shape = series.map((one) => one.name).join("\u0000") + JSON.stringify(hidden) + zoom;
  // uPlot spans years around one moment: another, without values, comes before it
  const data = useMemo(() => (t.length === 1 ? [[t[0] - 10, t[0]], ...series.map((one) => [null, one.y[0]])] : [t, ...series.map((one) => one.y)]), [t, series]);
  useLayoutEffect(() => {
    const make = () => {
      if (plot.current) plot.current.destroy();
      const dim = css("--dim"), line = css("--line");
      const axis = { stroke: dim, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px ui-sans-serif, system-ui, sans-serif" };
      plot.current = new uPlot({
        width: place.current.clientWidth || 300, height, legend: { show: false },
        cursor: { y: false, points: { size: 6 } }, padding: [10, 26, 0, 0],
        scales: { x: { range: (u, low, high) => (low == null ? [Date.now() / 1000 - 10, Date.now() / 1000] : [Math.min(low, high - 10), high]) }, y: { range: (u, low, high) => (zoom && low != null && high - low < Math.abs(high) / 2 ? [low - (high - low || 1) * 0.15, high + (high - low || 1) * 0.15] : [Math.min(0, low ?? 0), (high ?? 1) > 0 ? high * 1.12 : 1]) } },
        axes: [{ ...axis, space: 74, values: (u, ticks, at, room, step) => ticks.map((v) => moment(v, step)) }, { ...axis, size: 62, values: (u, ticks) => ticks.map((v, i) => (i && format(v) === format(ticks[i - 1]) ? "" : format(v))) }],
        series: [{}, ...series.map((one, i) => ({
          label: one.name, show: !hidden[one.name], stroke: css(one.color || COLORS[i % 8]), width: 2, spanGaps: false, points: { show: (u) => u.data[0].length < 3 },
          fill: one.fill === false ? undefined : css(one.color || COLORS[i % 8]) + "22",
        }))],
        hooks: { setCursor: [(u) => point(u.cursor.idx)] },
      }, data, place.current);
    };
    make();
    const sized = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth || 300, height }));
    sized.observe(place.current);
    addEventListener("penstock-theme", make);
    return () => { sized.disconnect(); removeEventListener("penstock-theme", make); plot.current.destroy(); plot.current = null; };
  }, [shape, height]);
  useLayoutEffect(() => { if (plot.current) plot.current.setData(data); }, [data]);
  const shown = at == null ? t.length - 1 : Math.min(at, t.length - 1);
  return html`<figure class="chart" role="img" aria-label=${label || series.map((one) => one.name).join(", ")}>
    <div ref=${place}></div>
    <figcaption>${series.map((one, i) => html`<button class=${"legend" + (hidden[one.name] ? " off" : "")} key=${one.name} title="show or hide"
        onClick=${() => hide({ ...hidden, [one.name]: !hidden[one.name] })}>
      <i style=${{ background: `var(${one.color || COLORS[i % 8]})` }}></i><span>${one.name}</span> <b>${one.y[shown] == null ? "–" : format(one.y[shown])}</b></button>`)}
    </figcaption></figure>`;
}

export function Spark({ y, color = "--accent", width = 96, height = 26 }) {
  const shown = y.filter((v) => v != null).slice(-90);
  if (shown.length < 2) return html`<svg class="spark" width=${width} height=${height} aria-hidden="true"></svg>`;
  const high = Math.max(...shown), low = Math.min(...shown, high * 0.98), room = high - low || 1;
  const points = shown.map((v, i) => `${((i / (shown.length - 1)) * width).toFixed(1)},${(height - 2 - ((v - low) / room) * (height - 4)).toFixed(1)}`);
  return html`<svg class="spark" width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} aria-hidden="true" style=${{ color: `var(${color})` }}>
    <polygon points=${`0,${height} ${points.join(" ")} ${width},${height}`} /><polyline points=${points.join(" ")} /></svg>`;
}

export function Bars({ rows, format = whole, onPick, picked }) {
  const high = Math.max(1, ...rows.map((one) => one[1]));
  return html`<ol class="bars">${rows.map(([name, n]) => html`<li key=${name}>
    <button class=${"bar" + (picked === name ? " picked" : "")} disabled=${!onPick} onClick=${() => onPick && onPick(name)}>
      <i style=${{ width: `${Math.max(0.6, (n / high) * 100)}%` }}></i><span>${name}</span><b>${format(n)}</b></button></li>`)}</ol>`;
}

// -- tables

export function Table({ columns, rows, onOpen, empty = "nothing here yet", label }) {
  const [sort, order] = useState(null);
  const shown = useMemo(() => {
    if (!sort) return rows;
    const by = columns[sort.at].sort, sign = sort.down ? -1 : 1;
    return [...rows].sort((a, b) => { const x = by(a), y = by(b); return (x == null) - (y == null) || (x < y ? -sign : x > y ? sign : 0); });
  }, [rows, sort]);
  const onKey = (event, row) => {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (step) { event.preventDefault(); const to = step > 0 ? event.currentTarget.nextElementSibling : event.currentTarget.previousElementSibling; if (to) to.focus(); }
    if (event.key === "Enter" && onOpen && event.target === event.currentTarget) onOpen(row);
  };
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll"><table aria-label=${label}>
    <thead><tr>${columns.map((one, at) => html`<th key=${one.name} class=${one.right ? "right" : ""} aria-sort=${sort && sort.at === at ? (sort.down ? "descending" : "ascending") : "none"}>
      ${one.sort ? html`<button onClick=${() => order(sort && sort.at === at ? (sort.down ? null : { at, down: true }) : { at, down: false })}>${one.name}${sort && sort.at === at ? (sort.down ? " ↓" : " ↑") : ""}</button>` : one.name}</th>`)}</tr></thead>
    <tbody>${shown.map((row, number) => html`<tr key=${row.id ?? number} tabindex=${onOpen ? "0" : undefined} class=${onOpen ? "opens" : ""}
        onClick=${(event) => onOpen && !event.target.closest("button, a") && onOpen(row)} onKeyDown=${(event) => onKey(event, row)}>
      ${columns.map((one) => html`<td key=${one.name} class=${(one.right ? "right " : "") + (one.mono ? "mono" : "")} data-name=${one.name}>${one.show(row)}</td>`)}</tr>`)}</tbody></table></div>`;
}

// -- bytes

export function forms(value) {
  const data = fromBase64(value.data), complete = data.length >= value.size;
  const text = asText(data, complete);
  let json = null;
  if (text != null && complete && /^\s*[[{"\d-]|^\s*(true|false|null)/.test(text)) { try { json = JSON.stringify(JSON.parse(text), null, 2); } catch { json = null; } }
  return { data, text, json, complete };
}
export function Payload({ value }) {
  const { data, text, json, complete } = useMemo(() => forms(value), [value]);
  const [form, set] = useState(null);
  const best = json != null && value.type !== "text" ? "JSON" : text != null ? "text" : "hex";
  const shown = form && (form !== "JSON" || json != null) && (form !== "text" || text != null) ? form : best;
  const dump = () => {
    const lines = [];
    for (let at = 0; at < Math.min(data.length, 65536); at += 16) {
      const part = data.subarray(at, at + 16);
      lines.push(at.toString(16).padStart(8, "0") + "  " + (toHex(part).match(/../g) || []).join(" ").padEnd(48) + " " + Array.from(part, (b) => (b > 31 && b < 127 ? String.fromCharCode(b) : "·")).join(""));
    }
    return lines.join("\n");
  };
  return html`<div class="payload"><div class="row tight" role="tablist">${["text", "JSON", "hex"].map((name) => html`<button key=${name} role="tab" aria-selected=${shown === name}
      class=${"tab" + (shown === name ? " on" : "")} disabled=${(name === "JSON" && json == null) || (name === "text" && text == null)} onClick=${() => set(name)}>${name}</button>`)}
    <span class="dim">${whole(value.size)} bytes${complete ? "" : `, the first ${whole(data.length)} shown`}</span></div>
    <pre>${shown === "JSON" ? json : shown === "text" ? text : dump()}</pre></div>`;
}
export function preview(value, length = 160) {
  const { data, text } = forms(value);
  const line = text == null ? "0x" + toHex(data.subarray(0, length / 2)) : text.replace(/[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "·");
  return line.length > length || data.length < value.size ? html`${line.slice(0, length)}<span class="dim"> … ${bytes(value.size)}</span>` : line;
}

// -- dialogs

let opener = null;
export const confirm = (question) => new Promise((resolve) => opener && opener({ ...question, resolve }));
export function Dialogs() {
  const [open, set] = useState(null), box = useRef(null);
  opener = set;
  useEffect(() => { if (open && box.current && !box.current.open) box.current.showModal(); }, [open]);
  if (!open) return null;
  const end = (answer) => { set(null); open.resolve(answer); };
  return html`<dialog ref=${box} onCancel=${() => end(false)} aria-labelledby="question"><h2 id="question">${open.title}</h2><p>${open.text}</p>
    <div class="row end"><button autofocus onClick=${() => end(false)}>Cancel</button><button class="danger" onClick=${() => end(true)}>${open.yes}</button></div></dialog>`;
}
export function Act({ name, given, title, text, yes, children, onDone, disabled }) {
  const [told, tell] = useState("");
  const [busy, work] = useState(false);
  const run = async () => {
    if (!(await confirm({ title, text, yes }))) return;
    work(true);
    try { const reply = await act(name, given); tell(reply.done); if (onDone) onDone(reply); } catch (error) { tell(error.message); }
    work(false);
  };
  return html`<span class="act"><button disabled=${disabled || busy} onClick=${run}>${busy ? "working …" : children}</button>${told && html` <span class="dim" role="status">${told}</span>`}</span>`;
}
export const Panel = ({ title, side, children, className = "" }) => html`<section class=${"panel " + className}>${(title || side) && html`<header><h2>${title}</h2>${side}</header>`}${children}</section>`;
export const noSample = () => html`<p class="dim">waiting for the first sample …</p>`;
export const Failed = ({ error }) => (error ? html`<p class="failed" role="alert">${error}</p>` : null);
export const Pick = ({ label, value, options, onChange }) => html`<label>${label}<select value=${value} onChange=${(event) => onChange(event.target.value)}>
  ${options.map((one) => html`<option key=${one} value=${one} selected=${one === value}>${one}</option>`)}</select></label>`;
export const State = ({ state }) => html`<span class=${"state " + state}>${state}</span>`;
