// Consumers with their lag, and streams with their dead letters.
import { html, useMemo, useState } from "./preact.js";
import { read, rate, rates, whole, short, span, clock, ago } from "./live.js";
import { Chart, Spark, Table, Panel, Act, preview, Payload, useLoad, link, noSample } from "./parts.js";

const of = (queue, name) => (sample) => sample.consumers.find((one) => one.queue === queue && one.name === name) || {};
const positions = (one) => Object.entries(one.position).slice(0, 8).map(([shard, at]) => `${shard}:${at}`).join(" ") + (Object.keys(one.position).length > 8 ? " …" : "");
function trend(history) {
  const known = history.filter((n) => n != null);
  if (known.length < 4) return ["·", ""];
  const half = Math.floor(known.length / 2), mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;
  const before = mean(known.slice(0, half)), after = mean(known.slice(half)), change = after - before;
  return Math.abs(change) < Math.max(1, 0.05 * before) ? ["steady", ""] : change > 0 ? ["▲ grows", "bad"] : ["▼ shrinks", "good"];
}

export function Consumers({ live, route }) {
  const { last, samples } = live;
  if (!last) return noSample();
  const recent = samples.slice(-120), picked = route.given.consumer;
  const rows = last.consumers.map((one) => { const history = recent.map((s) => of(one.queue, one.name)(s).lag); return { id: one.queue + "\u0000" + one.name, ...one, history, trend: trend(history) }; });
  const shown = rows.filter((one) => !picked || one.name === picked).slice(0, 6);
  const chart = useMemo(() => shown.map((one) => ({ name: `${one.queue} · ${one.name}`, y: samples.map((s) => of(one.queue, one.name)(s).lag ?? null) })), [samples, picked]);
  const late = useMemo(() => shown.map((one) => ({ name: `${one.queue} · ${one.name}`, y: samples.map((s) => of(one.queue, one.name)(s).lag_s ?? null) })), [samples, picked]);
  const t = useMemo(() => samples.map((s) => s.t), [samples]);
  return html`<h1>Consumers</h1><${Panel}><${Table} label="consumers" rows=${rows} empty="no consumer has read a queue yet" columns=${[
      { name: "consumer", show: (one) => html`<b>${one.name}</b>`, sort: (one) => one.name }, { name: "queue", show: (one) => html`<a href=${link("rows", { table: one.queue })}>${one.queue}</a>`, sort: (one) => one.queue },
      { name: "mode", show: (one) => one.mode }, { name: "lag", right: true, show: (one) => html`<b data-lag=${one.queue + "/" + one.name}>${whole(one.lag)}</b>`, sort: (one) => one.lag }, { name: "lag in time", right: true, show: (one) => span(one.lag_s), sort: (one) => one.lag_s },
      { name: "last two minutes", show: (one) => html`<${Spark} y=${one.history} color=${one.trend[1] === "bad" ? "--bad" : "--accent"} />` }, { name: "trend", show: (one) => html`<span class=${one.trend[1]}>${one.trend[0]}</span>` },
      { name: "leased", right: true, show: (one) => whole(one.leased), sort: (one) => one.leased }, { name: "position", mono: true, show: positions },
      { name: "seen", show: (one) => ago(one.seen), sort: (one) => one.seen }]} /><//>
    ${rows.length > 0 && html`<div class="grid2"><${Panel} title="Lag in messages"><${Chart} t=${t} series=${chart} format=${short} /><//><${Panel} title="Lag in time"><${Chart} t=${t} series=${late} format=${span} /><//></div>`}`;
}

export function Streams({ live }) {
  const { last, samples, hello } = live;
  if (!last) return noSample();
  const verdicts = last.flows.groups_refused_total_by_verdict || {};
  const streams = last.consumers.filter((one) => one.stream);
  const queues = last.tables.filter((one) => one.kind === "queue").map((one) => one.name);
  return html`<h1>Streams</h1>
    <${Panel} title="Exactly once" side=${html`<span class="dim">since the store was made</span>`}><dl class="facts"><div><dt>duplicates refused</dt><dd class="big" id="duplicates">${whole(verdicts.duplicate)}</dd></div><div><dt>conditions refused</dt><dd class="big">${whole(verdicts.refused)}</dd></div><div><dt>tokens too old</dt><dd class="big">${whole(verdicts.token_too_old)}</dd></div></dl>
      <p class="dim">A batch moves the position of its consumer in the commit that writes its rows. One that is sent again finds the position moved, and nothing is written twice.</p><//>
    ${streams.length ? streams.map((one) => html`<${Stream} key=${one.queue + "\u0000" + one.name} one=${one} live=${live} />`) : html`<${Panel}><p class="empty">no stream has committed a batch to a queue of this store</p><//>`}
    ${queues.map((name) => html`<${Letters} key=${name} queue=${name} write=${hello.write} />`)}`;
}

function Stream({ one, live }) {
  const { samples } = live;
  const count = (name) => (s) => of(one.queue, one.name)(s).stream?.[name];
  const fact = (name, key, bad) => html`<div><dt>${name}</dt><dd class=${bad && one.stream[key] ? "warn" : ""} data-stream=${`${one.queue}/${one.name}/${key}`}>${whole(one.stream[key])}</dd></div>`;
  const [t, rowsIn] = useMemo(() => rates(samples, count("rows_in")), [samples]);
  const [, rowsOut] = useMemo(() => rates(samples, count("rows_out")), [samples]);
  const lag = useMemo(() => samples.map((s) => of(one.queue, one.name)(s).lag ?? null), [samples]);
  return html`<${Panel} title=${one.name} side=${html`<span class="dim">reads <a href=${link("rows", { table: one.queue })}>${one.queue}</a></span>`}>
    <dl class="facts"><div><dt>position</dt><dd class="mono">${positions(one)}</dd></div><div><dt>lag</dt><dd>${whole(one.lag)} · ${span(one.lag_s)}</dd></div>
      ${fact("batches", "batches")}${fact("rows in", "rows_in")}${fact("rows out", "rows_out")}${fact("duplicates refused", "duplicates")}${fact("dead letters", "dead", true)}
      <div><dt>last commit</dt><dd>${one.seen ? ago(one.seen) : "before the store was opened"}</dd></div><div><dt>now</dt><dd>${short(rate(samples, count("rows_in"), 20))} in/s · ${short(rate(samples, count("rows_out"), 20))} out/s</dd></div></dl>
    <div class="grid2"><${Chart} t=${t} series=${[{ name: "rows in/s", y: rowsIn }, { name: "rows out/s", y: rowsOut, color: "--c2" }]} format=${short} height=${150} /><${Chart} t=${samples.map((s) => s.t)} series=${[{ name: "lag", y: lag, color: "--c3" }]} format=${short} height=${150} /></div><//>`;
}

function Letters({ queue, write }) {
  const { data, error, reload } = useLoad(() => read("letters", { table: queue }), [queue]);
  const [open, show] = useState(null);
  if (error || !data || !data.letters.length) return null;
  const reasons = Object.entries(data.letters.reduce((all, one) => ({ ...all, [one.reason]: (all[one.reason] || 0) + 1 }), {})).sort((a, b) => b[1] - a[1]);
  return html`<${Panel} title=${`Dead letters in ${queue}`} side=${html`<button onClick=${reload}>Read again</button>`}>
    <p class="dim">${whole(data.letters.length)} of ${whole(data.total)} messages shown. ${reasons.slice(0, 3).map(([reason, n]) => `${n}× ${reason}`).join(" · ").slice(0, 300)}</p>
    <${Table} label=${"dead letters of " + queue} rows=${data.letters.map((one) => ({ id: `${one.shard}/${one.sequence}`, ...one }))} onOpen=${(one) => show(open === one.id ? null : one.id)} columns=${[
      { name: "time (UTC)", mono: true, show: (one) => clock(one.time) }, { name: "from", show: (one) => `${one.source}${one.from.sequence == null ? "" : ` · ${one.from.shard}:${one.from.sequence}`}` }, { name: "reason", show: (one) => html`<span class="reason">${one.reason}</span>` },
      { name: "message", mono: true, show: (one) => (open === one.id ? html`<${Payload} value=${one.payload} />` : preview(one.payload, 80)) },
      { name: "", show: (one) => write && html`<${Act} name="put_back" given=${{ table: queue, shard: one.shard, sequence: one.sequence }} title="Put it back?" text=${`The message is appended to ${one.source} and will be read again. Its dead letter stays in ${queue}.`} yes="Put back">Put back<//>` }]} /><//>`;
}
