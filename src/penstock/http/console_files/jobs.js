// Jobs on an axis of time, files by level, and members of a cluster.
import { html, useEffect, useMemo } from "./preact.js";
import { read, whole, bytes, span, clock, ago } from "./live.js";
import { Table, Panel, Failed, Pick, State, Act, useLoad, go } from "./parts.js";

export function Jobs({ live, route }) {
  const { data, error, reload } = useLoad(() => read("jobs"), []);
  useEffect(() => { const timer = setInterval(reload, 3000); return () => clearInterval(timer); }, []);
  const tables = (live.last?.tables || []).filter((one) => one.kind !== "queue"), given = route.given;
  const table = tables.find((one) => one.name === given.table) || [...tables].sort((a, b) => (b.bytes || 0) - (a.bytes || 0))[0];
  const jobs = data ? data.jobs : [];
  const count = (state) => jobs.filter((one) => one.state === state).length;
  return html`<h1>Jobs</h1><${Failed} error=${error} /><${Panel} title="Timeline" side=${html`<span class="dim">from the request of a job to its end</span>`}><${Timeline} jobs=${jobs} /><//>
    <${Panel} title="Jobs" side=${html`<span class="dim">${["pending", "running", "failed", "done"].map((name) => `${whole(count(name))} ${name}`).join(" · ")}</span>`}>
      <${Table} label="jobs" rows=${jobs.slice(0, 60).map((one) => ({ id: one.job, ...one }))} empty="no job has run yet" columns=${[{ name: "job", right: true, show: (one) => one.job, sort: (one) => one.job }, { name: "kind", show: (one) => html`<span class=${"jobkind " + one.kind.split(" ").pop()}>${one.kind}</span>`, sort: (one) => one.kind }, { name: "table", show: (one) => one.table, sort: (one) => one.table }, { name: "state", show: (one) => html`<${State} state=${one.state} />`, sort: (one) => one.state },
        { name: "requested (UTC)", mono: true, show: (one) => clock(one.created_us / 1e6), sort: (one) => one.created_us }, { name: "took", right: true, show: (one) => (one.finished_us ? span((one.finished_us - one.created_us) / 1e6) : one.started_us ? "runs " + ago(one.started_us / 1e6).replace(" ago", "") : "waits") }, { name: "attempts", right: true, show: (one) => `${one.attempts} of ${one.attempts_max}` }, { name: "error", show: (one) => html`<span class="reason">${one.error}</span>` },
        { name: "", show: (one) => live.hello.write && one.state === "failed" && html`<${Act} name="retry" given=${{ job: one.job }} title=${`Retry job ${one.job}?`} text=${`The ${one.kind} of ${one.table || "the store"} is enqueued once more.`} yes="Retry" onDone=${reload}>Retry<//>` }]} /><//>
    ${table && html`<${Chunks} key=${table.name} table=${table.name} tables=${tables.map((one) => one.name)} />`}`;
}

const LANES = ["flush", "compaction", "checkpoint", "rollup", "train", "archive", "verify", "purge", "rehydrate"];
function Timeline({ jobs }) {
  const now = Date.now() * 1000, width = 1000;
  const oldest = Math.min(...jobs.map((one) => one.created_us), now - 60e6), from = Math.max(oldest, now - 3600e6), room = now - from;
  const kinds = LANES.filter((kind) => jobs.some((one) => one.kind.endsWith(kind)));
  if (!jobs.length) return html`<p class="empty">no job has run yet</p>`;
  const x = (us) => Math.max(0, ((us - from) / room) * width), height = 24 + Math.max(1, kinds.length) * 26;
  return html`<div class="scroll"><svg class="timeline" viewBox=${`0 0 ${width + 110} ${height}`} role="img" aria-label="jobs on an axis of time">
    ${[0, 0.25, 0.5, 0.75, 1].map((part) => html`<g key=${part}><line x1=${100 + part * width} x2=${100 + part * width} y1="0" y2=${height - 18} /><text x=${100 + part * width} y=${height - 4} text-anchor=${part === 1 ? "end" : "middle"}>${part === 1 ? "now" : "−" + span((room * (1 - part)) / 1e6)}</text></g>`)}
    ${kinds.map((kind, lane) => html`<g key=${kind}><text x="0" y=${lane * 26 + 18} class="lane">${kind}</text>
      ${jobs.filter((one) => one.kind.endsWith(kind) && (one.finished_us || now) >= from).slice(0, 400).map((one) => html`<rect key=${one.job} class=${`${kind} ${one.state}`} x=${100 + x(one.created_us)} y=${lane * 26 + 5} rx="2" height="17" width=${Math.max(2.5, x(one.finished_us || now) - x(one.created_us))}><title>${`${one.kind} of ${one.table || "the store"}, job ${one.job}: ${one.state}, ${span(((one.finished_us || now) - one.created_us) / 1e6)}`}</title></rect>`)}</g>`)}</svg></div>`;
}

const size = (list) => list.reduce((sum, one) => sum + one.size_bytes, 0);
function Chunks({ table, tables }) {
  const { data, error, reload } = useLoad(() => read("chunks", { table }), [table]);
  const levels = useMemo(() => { const all = new Map(); (data?.chunks || []).forEach((one) => all.set(one.level, [...(all.get(one.level) || []), one])); return [...all.entries()].sort((a, b) => a[0] - b[0]); }, [data]);
  const most = Math.max(1, ...levels.map(([, list]) => size(list)));
  return html`<${Panel} title="Files" side=${html`<span class="row tight"><${Pick} label="" value=${table} options=${tables} onChange=${(name) => go("jobs", { table: name })} /><button onClick=${reload}>Read again</button></span>`}><${Failed} error=${error} />
    ${data && (data.chunks.length ? html`<div class="chunkmap" aria-label="files by level">${levels.map(([level, list]) => html`<div key=${level}><em>L${level}</em><div class="chunkrow" style=${{ width: `${Math.max(2, (size(list) / most) * 100)}%` }}>${list.slice(0, 200).map((one) => html`<i key=${one.file} class=${one.residency} style=${{ flexGrow: one.size_bytes }} title=${`file ${one.chunk}: ${bytes(one.size_bytes)}, ${whole(one.rows)} rows`}></i>`)}</div><b>${whole(list.length)} · ${bytes(size(list))}</b></div>`)}</div>
      <${Table} label="files" rows=${data.chunks.slice(0, 100).map((one) => ({ id: one.file, ...one }))} columns=${[{ name: "file", right: true, mono: true, show: (one) => one.chunk, sort: (one) => one.chunk }, { name: "level", right: true, show: (one) => one.level, sort: (one) => one.level }, { name: "shard", right: true, show: (one) => one.shard, sort: (one) => one.shard }, { name: "rows", right: true, show: (one) => whole(one.rows), sort: (one) => one.rows }, { name: "bytes", right: true, show: (one) => bytes(one.size_bytes), sort: (one) => one.size_bytes }, { name: "deletes", right: true, show: (one) => whole(one.deletes) }, { name: "LSNs", mono: true, show: (one) => (one.lsn_max ? `${one.lsn_min}–${one.lsn_max}` : "") }, { name: "is", show: (one) => html`<${State} state=${one.residency} />` }]} />` : html`<p class="empty">nothing of ${table} is in files yet</p>`)}<//>`;
}

export function Cluster({ live }) {
  const { data, error, reload } = useLoad(() => read("members"), []);
  useEffect(() => { const timer = setInterval(reload, 4000); return () => clearInterval(timer); }, []);
  const last = live.last;
  if (data && data.members) {
    const answer = data.members.filter((one) => one.role !== "away").length, needed = Math.floor(data.members.length / 2) + 1;
    const means = answer < needed ? "too few: no write can become durable" : answer === needed && needed > 1 ? "enough for writes, and no more may fail" : "writes go on if a machine fails";
    return html`<h1>Cluster</h1><${Failed} error=${error} /><p id="answer" class=${answer < needed ? "bad" : answer < data.members.length ? "warn" : "dim"}>${answer} of ${data.members.length} members answer: ${means}.</p><div class="members">${data.members.map((one) => html`<div key=${one.name} class=${"member " + one.role}><svg viewBox="0 0 24 24" width="34" height="34" aria-hidden="true"><path d="M4 5h16v5H4zM4 14h16v5H4zM7 7.5h.1M7 16.5h.1" /></svg><h2>${one.name}</h2><p class="mono">${one.address}</p><span class=${"state " + (one.role === "away" ? "failed" : one.role === "leads" ? "active" : "follows")}>${one.role}</span></div>`)}</div>
      ${last && html`<${Panel} title="This connection"><dl class="facts"><div><dt>durable</dt><dd>LSN ${whole(last.store.durable_lsn)}</dd></div><div><dt>applied</dt><dd>LSN ${whole(last.store.applied_lsn)}</dd></div><div><dt>incarnation</dt><dd>${whole(last.store.incarnation)}</dd></div></dl><//>`}`;
  }
  return html`<h1>Cluster</h1><${Panel}><p>This store has one copy, on this machine.</p><p class="dim">A store with three copies goes on when a machine fails: <code>penstock cluster init</code> makes its files. To see its members here, start the console with <code>--cluster FOLDER</code>.</p>
    ${last && html`<dl class="facts"><div><dt>takes writes</dt><dd>${last.flows.consensus_is_leader ? "yes" : "no"}</dd></div><div><dt>incarnation</dt><dd>${whole(last.store.incarnation)}</dd></div><div><dt>durable</dt><dd>LSN ${whole(last.store.durable_lsn)}</dd></div><div><dt>clock ahead</dt><dd>${span(Math.abs(last.flows.clock_ahead_seconds || 0))}</dd></div></dl>`}<${Failed} error=${error} /><//>`;
}
