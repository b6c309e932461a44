// Tables with their growth, one table, and its rows or messages.
import { html, useState, useMemo, useEffect } from "./preact.js";
import { read, values, rate, whole, short, bytes, clock, keyText, keyHex } from "./live.js";
import { Chart, Spark, Table, Panel, Failed, Payload, preview, Pick, State, Act, useLoad, link, go, noSample } from "./parts.js";

const of = (name) => (sample) => sample.tables.find((one) => one.name === name) || {};

export function Tables({ live, route }) {
  const name = route.given.table;
  if (name) return html`<${OneTable} live=${live} name=${name} />`;
  const { last, samples } = live;
  if (!last) return noSample();
  const total = useMemo(() => values(samples, (one) => one.tables.reduce((sum, t) => sum + (t.bytes || 0) + (t.memory || 0), 0)), [samples]);
  const rows = last.tables.map((one) => ({ id: one.name, ...one, history: samples.slice(-300).map((s) => of(one.name)(s).rows), grows: rate(samples, (s) => of(one.name)(s).rows, 30) }));
  const columns = [
    { name: "table", show: (one) => html`<a href=${link("tables", { table: one.name })}><b>${one.name}</b></a>`, sort: (one) => one.name },
    { name: "kind", show: (one) => html`<span class=${"kind " + one.kind}>${one.kind}</span>`, sort: (one) => one.kind },
    { name: "rows", right: true, show: (one) => whole(one.rows), sort: (one) => one.rows },
    { name: "growth", show: (one) => html`<${Spark} y=${one.history} />` },
    { name: "per second", right: true, show: (one) => (one.grows ? "+" + short(one.grows) : "·"), sort: (one) => one.grows },
    { name: "files", right: true, show: (one) => whole(one.files), sort: (one) => one.files },
    { name: "on disk", right: true, show: (one) => bytes(one.bytes), sort: (one) => one.bytes },
    { name: "in memory", right: true, show: (one) => bytes(one.memory), sort: (one) => one.memory },
    { name: "behind", right: true, show: (one) => whole(one.behind), sort: (one) => one.behind },
    { name: "state", show: (one) => html`<${State} state=${one.state} />`, sort: (one) => one.state },
  ];
  return html`<h1>Tables</h1><${Panel}><${Table} label="tables" columns=${columns} rows=${rows} onOpen=${(one) => go("tables", { table: one.name })} empty="no tables yet: penstock table create" /><//>
    <${Panel} title="Bytes of all tables"><${Chart} t=${total[0]} series=${[{ name: "on disk and in memory", y: total[1] }]} format=${bytes} /><//>`;
}

const WORDS = { rows_max: "rows at most", memory_bytes: "bytes in memory", file_bytes: "bytes in files", runs_max: "sorted runs", recall_queries: "queries measured", memory_bytes_per_vector: "bytes per vector" };

function OneTable({ live, name }) {
  const { samples, last, hello } = live;
  const { data, error, reload } = useLoad(() => read("table", { table: name }), [name]);
  useEffect(() => { const timer = setInterval(reload, 5000); return () => clearInterval(timer); }, [name]);
  const now = last ? of(name)(last) : {};
  const grown = useMemo(() => [values(samples, (s) => of(name)(s).rows), values(samples, (s) => of(name)(s).bytes), values(samples, (s) => of(name)(s).memory)], [samples, name]);
  if (error) return html`<h1>${name}</h1><${Failed} error=${error} />`;
  if (!data) return html`<p class="dim">reading …</p>`;
  const browse = { kv: "rows", queue: "rows", series: "promql", vector: "vectors" }[data.kind];
  const most = Math.max(1, ...data.levels.map((one) => one.bytes));
  return html`<h1><a href=${link("tables")}>Tables</a> / ${name}</h1><div class="row"><span class=${"kind " + data.kind}>${data.kind}</span><${State} state=${now.state || "active"} />
      ${browse && html`<a class="button" href=${link(browse, { table: name })}>${{ rows: "Browse", promql: "Query", vectors: "Neighbours" }[browse]}</a>`}
      ${data.kind === "series" && html`<a class="button" href=${link("cardinality", { table: name })}>Cardinality</a>`}<a class="button" href=${link("jobs", { table: name })}>Files</a>
      ${hello.write && data.kind !== "queue" && html`<${Act} name="compact" given=${{ table: name }} title=${`Compact ${name}?`} text="All its files are merged into as few as possible. Nothing is lost; the disk works for a while." yes="Compact" onDone=${reload}>Compact<//>`}
      ${hello.write && now.state === "paused" && html`<${Act} name="resume" given=${{ table: name }} title=${`Resume ${name}?`} text="It tries again to apply what failed." yes="Resume" onDone=${reload}>Resume<//>`}</div>
    <div class="grid2"><${Panel} title="Rows"><${Chart} t=${grown[0][0]} series=${[{ name: "rows", y: grown[0][1] }]} format=${short} /><//>
      <${Panel} title="Bytes"><${Chart} t=${grown[1][0]} series=${[{ name: "in files", y: grown[1][1], color: "--c6" }, { name: "in memory", y: grown[2][1], color: "--c5" }]} format=${bytes} /><//>
      <${Panel} title="Numbers"><dl class="facts">${Object.entries(data.numbers).map(([word, n]) => html`<div key=${word}><dt>${WORDS[word] || word.replaceAll("_", " ")}</dt><dd>${typeof n === "number" ? (word.includes("bytes") ? bytes(n) : Number.isInteger(n) ? whole(n) : n.toFixed(4)) : String(n)}</dd></div>`)}</dl><//>
      <${Panel} title="Levels">${data.levels.length ? html`<div class="levels tall">${data.levels.map((one) => html`<span key=${one.level}><i style=${{ width: `${(one.bytes / most) * 100}%` }}></i><em>L${one.level}</em><b>${whole(one.files)} files · ${bytes(one.bytes)} · ${short(one.rows)} rows</b></span>`)}</div>` : html`<p class="empty">${data.kind === "queue" ? "a queue has files of its own" : "nothing is in files yet"}</p>`}<//>
      <${Panel} title="Columns"><${Table} columns=${[{ name: "name", show: (one) => one.name }, { name: "type", mono: true, show: (one) => one.type }]} rows=${data.columns} /><//>
      <${Panel} title="Shards"><${Table} columns=${[{ name: "shard", show: (one) => one.shard }, { name: "state", show: (one) => html`<${State} state=${one.state} />` }, { name: "stored", right: true, show: (one) => whole(one.stored) }, { name: "applied", right: true, show: (one) => whole(one.applied) }, { name: "durable", right: true, show: (one) => whole(one.durable) }, { name: "behind", right: true, show: (one) => whole(one.enqueued_ops) }]} rows=${data.partitions} empty="no shard is open" /><//></div>`;
}

// -- rows and messages

export function Rows({ live, route }) {
  const tables = (live.last?.tables || live.hello.tables).filter((one) => one.kind === "kv" || one.kind === "queue");
  const given = route.given, table = tables.find((one) => one.name === given.table) || tables[0];
  if (!table) return html`<h1>Rows</h1><p class="empty">there is no kv table or queue yet</p>`;
  return html`<h1>Rows</h1>${table.kind === "kv" ? html`<${KvRows} key=${table.name} live=${live} table=${table} tables=${tables} given=${given} />` : html`<${QueueRows} key=${table.name} live=${live} table=${table} tables=${tables} given=${given} />`}`;
}

function KvRows({ live, table, tables, given }) {
  const { data, error, reload } = useLoad(() => read("rows", { table: table.name, prefix: keyHex(given.prefix || ""), contains: given.contains, after: given.after, reverse: given.reverse }), [table.name, given.prefix, given.contains, given.after, given.reverse]);
  const set = (some) => go("rows", { table: table.name, prefix: given.prefix, contains: given.contains, reverse: given.reverse, ...some });
  return html`<${Panel}><form class="row" onSubmit=${(event) => { event.preventDefault(); const e = event.target.elements; set({ prefix: e.prefix.value, contains: e.wanted.value, after: "" }); }}>
      <${Pick} label="table" value=${table.name} options=${tables.map((one) => one.name)} onChange=${(name) => go("rows", { table: name })} />
      <label>key begins with<input name="prefix" value=${given.prefix || ""} placeholder="text, or 0x…" spellcheck="false" /></label><label>contains<input name="wanted" value=${given.contains || ""} spellcheck="false" /></label>
      <button class="primary">Find</button><button type="button" onClick=${() => set({ reverse: given.reverse ? "" : "1", after: "" })}>${given.reverse ? "from the end" : "from the start"}</button></form>
    <${Failed} error=${error} />${data && html`<${Table} label="rows" rows=${data.rows.map((one) => ({ id: one.key, ...one }))} onOpen=${(one) => set({ key: one.key, after: given.after })} empty=${`no row of ${whole(data.scanned)} matches`}
      columns=${[{ name: "key", mono: true, show: (one) => keyText(one.key) }, { name: "value", mono: true, show: (one) => preview(one.value) }, { name: "bytes", right: true, show: (one) => whole(one.value.size) }]} />
    <div class="row"><span class="dim">${whole(data.rows.length)} shown, ${whole(data.scanned)} read</span><span class="spring"></span>${given.after && html`<a class="button" href=${link("rows", { table: table.name, prefix: given.prefix, contains: given.contains, reverse: given.reverse })}>To the first</a>`}
      ${data.next && html`<button onClick=${() => set({ after: data.next })}>More</button>`}</div>`}<//>
    ${given.key && html`<${OneRow} live=${live} table=${table.name} hex=${given.key} onClose=${() => set({ after: given.after })} onGone=${() => { set({ after: given.after }); reload(); }} />`}`;
}

function OneRow({ live, table, hex, onClose, onGone }) {
  const { data, error } = useLoad(() => read("row", { table, key: hex }), [table, hex]);
  return html`<${Panel} className="detail" title=${keyText(hex)} side=${html`<button onClick=${onClose}>Close</button>`}><${Failed} error=${error} />
    ${data && html`<${Payload} value=${data.value} /><dl class="facts"><div><dt>table</dt><dd>${table}</dd></div><div><dt>LSN</dt><dd>${whole(data.lsn)}</dd></div><div><dt>key, hex</dt><dd class="mono">${hex}</dd></div></dl>
      ${live.hello.write && html`<${Act} name="delete" given=${{ table, key: hex }} title="Delete this row?" text=${`The key ${keyText(hex)} of ${table} and its value are gone for good.`} yes="Delete" onDone=${onGone}>Delete<//>`}`}<//>`;
}

function QueueRows({ live, table, tables, given }) {
  const [follow, turn] = useState(false);
  const { data, error, reload } = useLoad(() => read("messages", { table: table.name, shard: given.shard, from: given.from, contains: given.contains }), [table.name, given.shard, given.from, given.contains]);
  useEffect(() => { if (!follow) return undefined; const timer = setInterval(reload, 1500); return () => clearInterval(timer); }, [follow]);
  const set = (some) => go("rows", { table: table.name, shard: given.shard, from: given.from, contains: given.contains, ...some });
  const rows = data ? data.rows.map((one) => ({ id: `${one.shard}/${one.sequence}`, ...one })) : [];
  return html`<${Panel}><form class="row" onSubmit=${(event) => { event.preventDefault(); const e = event.target.elements; set({ from: e.from.value, contains: e.wanted.value }); }}>
      <${Pick} label="queue" value=${table.name} options=${tables.map((one) => one.name)} onChange=${(name) => go("rows", { table: name })} />
      ${table.shards > 1 && html`<${Pick} label="shard" value=${given.shard || "0"} options=${Array.from({ length: table.shards }, (_, i) => String(i))} onChange=${(shard) => set({ shard, from: "" })} />`}
      <label>from sequence<input name="from" inputmode="numeric" pattern="[0-9]*" value=${given.from || ""} placeholder="the last ones" /></label><label>contains<input name="wanted" value=${given.contains || ""} spellcheck="false" /></label>
      <button class="primary">Find</button><button type="button" aria-pressed=${follow} onClick=${() => { if (!follow) set({ from: "" }); turn(!follow); }}>${follow ? "following" : "follow"}</button></form>
    <${Failed} error=${error} />${data && html`<${Table} label="messages" rows=${given.from ? rows : [...rows].reverse()} onOpen=${(one) => set({ sequence: one.sequence })} empty=${`no message of ${whole(data.scanned)} matches`}
      columns=${[{ name: "sequence", right: true, show: (one) => one.sequence }, { name: "time (UTC)", mono: true, show: (one) => clock(one.time) }, { name: "key", mono: true, show: (one) => (one.key == null ? "" : keyText(one.key)) }, { name: "payload", mono: true, show: (one) => preview(one.payload) }]} />
    <div class="row"><span class="dim">messages ${whole(data.first)} to ${whole(data.end - 1)}</span><span class="spring"></span>
      ${data.rows.length > 0 && data.rows[0].sequence > data.first && html`<button onClick=${() => set({ from: Math.max(data.first, data.rows[0].sequence - 50) })}>Earlier</button>`}${data.next && html`<button onClick=${() => set({ from: data.next })}>Later</button>`}<button onClick=${() => set({ from: "" })}>The last</button></div>`}<//>
    ${given.sequence && html`<${OneMessage} table=${table.name} shard=${given.shard || 0} sequence=${given.sequence} onClose=${() => set({})} />`}`;
}

function OneMessage({ table, shard, sequence, onClose }) {
  const { data, error } = useLoad(() => read("message", { table, shard, sequence }), [table, shard, sequence]);
  return html`<${Panel} className="detail" title=${`${table} · shard ${shard} · ${whole(Number(sequence))}`} side=${html`<button onClick=${onClose}>Close</button>`}><${Failed} error=${error} />
    ${data && html`<${Payload} value=${data.payload} /><dl class="facts"><div><dt>time (UTC)</dt><dd>${clock(data.time)}</dd></div><div><dt>key</dt><dd class="mono">${data.key == null ? "none" : keyText(data.key)}</dd></div>
      ${Object.entries(data.headers).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd class="mono">${preview(value)}</dd></div>`)}</dl>`}<//>`;
}
