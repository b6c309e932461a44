// What the page knows: requests, samples that the server sends, and numbers as text.
import { useState, useEffect } from "./preact.js";

export const state = { hello: null, samples: [], connected: false, needsToken: false, error: "" };
const SAMPLES_MAX = 900;
const AGAIN_MS = 5000;
const listeners = new Set();
const changed = () => listeners.forEach((one) => one());

export function useLive() {
  const [, turn] = useState(0);
  useEffect(() => {
    const one = () => turn((n) => n + 1);
    listeners.add(one);
    return () => listeners.delete(one);
  }, []);
  const samples = state.samples;
  return { ...state, last: samples[samples.length - 1] };
}

// -- requests

export async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: { "X-Penstock-Console": "1", ...(options.headers || {}) } });
  let body = {};
  try { body = await response.json(); } catch { /* not JSON: the status says enough */ }
  if (response.status === 401) { state.needsToken = true; changed(); }
  if (!response.ok) throw new Error(body.error || `the server answered ${response.status}`);
  return body.data;
}
const query = (given) => new URLSearchParams(Object.entries(given).filter(([, v]) => v !== "" && v != null)).toString();
export const read = (name, given = {}) => ask(`/console/api/${name}?${query(given)}`);
export const act = (name, given = {}) => ask(`/console/api/do/${name}`, { method: "POST", body: JSON.stringify(given) });
export const promql = (table, name, given) =>
  ask(`/prometheus/${encodeURIComponent(table)}/api/v1/${name}`, {
    method: "POST", body: new URLSearchParams(given).toString(), headers: { "Content-Type": "application/x-www-form-urlencoded" },
  });

export async function login(token) {
  await ask("/console/api/login", { method: "POST", body: JSON.stringify({ token }) });
  state.needsToken = false;
  await start();
}

// -- the live samples

let events = null;
export async function start() {
  const given = /[#&]token=([0-9a-zA-Z]+)/.exec(location.hash);
  if (given) {
    history.replaceState(null, "", location.pathname + "#/health"); // the token does not stay in the address
    try { await login(given[1]); } catch (error) { state.error = error.message; changed(); }
    return;
  }
  try { state.hello = await ask("/console/api/hello"); } catch (error) { if (!state.needsToken) again(error.message); changed(); return; }
  state.error = "";
  state.needsToken = false;
  changed();
  if (events) events.close();
  events = new EventSource("/console/events");
  events.addEventListener("history", (event) => { state.samples = JSON.parse(event.data).filter((one) => one.store); state.connected = true; changed(); });
  events.addEventListener("sample", (event) => {
    const sample = JSON.parse(event.data);
    state.connected = true;
    if (sample.error) { state.error = sample.error; changed(); return; }
    state.error = "";
    const last = state.samples[state.samples.length - 1];
    if (!last || sample.t > last.t) state.samples = [...state.samples.slice(1 - SAMPLES_MAX), sample];
    else if (sample.t < last.t) state.samples = [sample]; // the server's clock was set back
    changed();
  });
  events.onerror = () => {
    state.connected = false;
    if (events.readyState === EventSource.CLOSED) again("the server sends this page no samples: too many may be open"); // a browser retries only what was cut
    changed();
  };
}
let waiting = null;
function again(reason) {
  state.error = `${reason}; trying again`;
  clearTimeout(waiting);
  waiting = setTimeout(start, AGAIN_MS);
}

// -- series of numbers out of samples

export function rates(samples, pick) {
  const t = [], y = [];
  for (let i = 1; i < samples.length; i++) {
    const dt = samples[i].t - samples[i - 1].t, before = pick(samples[i - 1]), now = pick(samples[i]);
    if (dt <= 0 || before == null || now == null) continue;
    t.push(samples[i].t); y.push(Math.max(0, (now - before) / dt));
  }
  return [t, y];
}
export const values = (samples, pick) => [samples.map((one) => one.t), samples.map((one) => pick(one) ?? null)];
export function rate(samples, pick, seconds = 5) {
  if (samples.length < 2) return 0;
  const last = samples[samples.length - 1];
  const first = samples.find((one) => one.t >= last.t - seconds - 0.5 && pick(one) != null) || last;
  return last.t > first.t ? Math.max(0, ((pick(last) ?? 0) - pick(first)) / (last.t - first.t)) : 0;
}
export function quantiles(samples, wanted, seconds = 10) {
  if (samples.length < 2) return wanted.map(() => null);
  const last = samples[samples.length - 1];
  const first = samples.find((one) => one.t >= last.t - seconds - 0.5) || samples[0];
  const bounds = Object.keys(last.flows.fsync).sort((a, b) => (a === "+Inf") - (b === "+Inf") || a - b);
  const counts = bounds.map((le) => last.flows.fsync[le] - (first.flows.fsync[le] ?? 0));
  const total = counts[counts.length - 1] || 0;
  return wanted.map((q) => {
    if (total <= 0) return null;
    const at = counts.findIndex((count) => count >= q * total);
    const high = Number(bounds[at] === "+Inf" ? bounds[at - 1] : bounds[at]), low = at ? Number(bounds[at - 1]) : 0;
    const inside = counts[at] - (at ? counts[at - 1] : 0);
    return low + (high - low) * (inside ? (q * total - (at ? counts[at - 1] : 0)) / inside : 1);
  });
}

// -- numbers as text

export const whole = (n) => (n == null ? "–" : Math.round(n).toLocaleString("en"));
export function short(n) {
  if (n == null) return "–";
  const a = Math.abs(n);
  if (a >= 1e9) return (n / 1e9).toFixed(2) + " G";
  if (a >= 1e6) return (n / 1e6).toFixed(2) + " M";
  if (a >= 1e4) return (n / 1e3).toFixed(1) + " k";
  return a >= 100 || Number.isInteger(n) ? Math.round(n).toLocaleString("en") : n.toFixed(a >= 10 ? 1 : 2);
}
export function bytes(n) {
  if (n == null) return "–";
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (Math.abs(n) < 1000 || unit === "TB") return (unit === "B" || n >= 100 ? Math.round(n) : n.toFixed(1)) + " " + unit;
    n /= 1000;
  }
}
export const ms = (s) => (s == null ? "–" : s < 0.001 ? (s * 1e6).toFixed(0) + " µs" : s < 1 ? (s * 1e3).toFixed(s < 0.01 ? 2 : 1) + " ms" : s.toFixed(2) + " s");
export function span(s) {
  if (s == null) return "–";
  if (s < 1) return s <= 0 ? "0 s" : (s * 1000).toFixed(0) + " ms";
  if (s < 120) return s.toFixed(s < 10 ? 1 : 0) + " s";
  return s < 7200 ? (s / 60).toFixed(0) + " min" : s < 172800 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " d";
}
export const clock = (t) => (t == null ? "–" : new Date(t * 1000).toISOString().replace("T", " ").replace(/\.?0*Z$/, "").slice(0, 23));
export const ago = (t) => (t == null ? "–" : span(Math.max(0, Date.now() / 1000 - t)) + " ago");

// -- bytes as text

export const fromBase64 = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
export const fromHex = (text) => Uint8Array.from(text.match(/../g) || [], (pair) => parseInt(pair, 16));
export const toHex = (data) => Array.from(data, (b) => b.toString(16).padStart(2, "0")).join("");
export function asText(data, whole = true) {
  try { return new TextDecoder("utf-8", { fatal: true }).decode(data, { stream: !whole }); } catch { return null; }
}
const UNPRINTABLE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/;
export function keyText(hex) {
  const text = asText(fromHex(hex));
  return text == null || UNPRINTABLE.test(text) || text.startsWith("0x") ? "0x" + hex : text;
}
export const keyHex = (text) => (/^0x([0-9a-f]{2})*$/i.test(text) ? text.slice(2).toLowerCase() : toHex(new TextEncoder().encode(text)));
