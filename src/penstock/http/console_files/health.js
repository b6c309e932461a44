// Health: the way of a write, drawn, with what flows through it now.
import { html, useMemo } from "./preact.js";
import { rates, values, rate, quantiles, whole, short, bytes, ms, span } from "./live.js";
import { Chart, Spark, Panel, State, link, noSample } from "./parts.js";

const writes = (one) => one.store.writes, written = (one) => one.store.written_bytes, flow = (name) => (one) => one.flows[name] ?? 0;
const fsyncs = (one) => one.flows.write_stage_seconds_count_by_stage?.journal ?? 0;
const rejects = (one) => Object.values(one.flows.admission_rejects_total_by_limit || {}).reduce((a, b) => a + b, 0);

function Pipe({ rate: now, high, back = false }) {
  const part = now > 0 ? Math.max(0.12, Math.min(1, Math.log1p(now) / Math.log1p(high || 1))) : 0;
  return html`<div class=${"pipe" + (part ? " flows" : "") + (back ? " back" : "")} style=${{ "--wide": `${4 + part * 10}px`, "--pace": `${(2.4 - part * 1.9).toFixed(2)}s` }} aria-hidden="true"><i></i></div>`;
}

function Stage({ id, name, big, small, spark, color, mark, warn }) {
  return html`<div class=${"stage" + (warn ? " warn" : "")} id=${id}><h3>${name}</h3><p class="big">${big}</p><p class="small">${small}</p>
    ${spark && html`<${Spark} y=${spark} color=${color} width=${108} height=${24} />`}${mark && html`<span class="mark">${mark}</span>`}</div>`;
}

export function Health({ live }) {
  const { samples, last } = live;
  if (!last) return noSample();
  const recent = samples.slice(-90), s = last.store, f = last.flows;
  const perSecond = rate(samples, writes), inBytes = rate(samples, written), syncs = rate(samples, fsyncs);
  const [p50, p99] = quantiles(samples, [0.5, 0.99]);
  const applied = rate(samples, (one) => one.store.applied_lsn), flushed = rate(samples, flow("memtable_flushed_bytes_total"), 20);
  const merged = rate(samples, flow("compacted_bytes_total"), 20), refused = rate(samples, rejects), waited = rate(samples, flow("admission_retries_total"));
  const behind = s.durable_lsn - s.applied_lsn, files = last.tables.reduce((sum, one) => sum + (one.bytes || 0), 0);
  const pressure = [
    s.waiting_writes > 0 && `${whole(s.waiting_writes)} writes wait for room`, waited > 0 && `${short(waited)}/s had to wait`, refused > 0 && `${short(refused)}/s refused`,
    f.tree_stall > 0 && (f.tree_stall > 1 ? "writers stop until files are merged" : "writers slow down until memtables are flushed and files merged"),
  ].filter(Boolean);
  const pressed = pressure.length > 0;
  const levels = Object.entries(f.level_bytes_by_level || {}).sort(), most = Math.max(1, ...levels.map(([, n]) => n));
  const stage = (name) => {
    const n = rate(samples, (one) => one.flows.write_stage_seconds_count_by_stage?.[name] ?? 0, 10), total = rate(samples, (one) => one.flows.write_stage_seconds_sum_by_stage?.[name] ?? 0, 10);
    return n ? total / n : null;
  };
  const charts = useMemo(() => {
    const [t, y] = rates(samples, writes), [, b] = rates(samples, written);
    const lows = [], highs = [], at = [];
    for (let i = 2; i < samples.length; i++) { const [low, high] = quantiles(samples.slice(Math.max(0, i - 5), i + 1), [0.5, 0.99], 5); at.push(samples[i].t); lows.push(low); highs.push(high); }
    const [ft, fy] = rates(samples, flow("memtable_flushed_bytes_total")), [, cy] = rates(samples, flow("compacted_bytes_total"));
    const [pt, pending] = values(samples, (one) => one.store.pending_bytes), [, flight] = values(samples, (one) => one.store.in_flight_bytes);
    return { t, y, b, at, lows, highs, ft, fy, cy, pt, pending, flight };
  }, [samples]);
  return html`<h1>Health</h1>
    ${(s.error || last.troubles.length > 0 || last.tables.some((one) => one.error)) && html`<${Panel} title="What is wrong" className="wrong"><ul>${s.error && html`<li>${s.error}</li>`}
      ${last.tables.filter((one) => one.error).map((one) => html`<li key=${one.name}><a href=${link("tables", { table: one.name })}>${one.name}</a>: ${one.error}</li>`)}
      ${last.troubles.map((one) => html`<li>${one.table}, shard ${one.shard}, LSN ${one.lsn}: ${one.reason}</li>`)}</ul><//>`}
    <${Panel} title="The way of a write" side=${html`<span class=${"pressure" + (pressed ? " on" : "")}>${pressed ? `backpressure: ${pressure.join(", ")}` : "no backpressure"}</span>`}>
      <div class="way">
        <${Stage} id="stage-writes" name="Writes" big=${html`${short(perSecond)}<small>/s</small>`} small=${`${bytes(inBytes)}/s`} spark=${rates(recent, writes)[1]} mark="written" />
        <${Pipe} rate=${perSecond} high=${50000} />
        <${Stage} id="stage-pending" name="Pending" big=${bytes(s.pending_bytes)} small=${`${bytes(s.in_flight_bytes)} in flight`} spark=${recent.map((one) => one.store.pending_bytes + one.store.in_flight_bytes)} color="--c3" warn=${pressed} />
        <${Pipe} rate=${perSecond} high=${50000} />
        <${Stage} id="stage-journal" name="Journal" big=${html`${short(syncs)}<small> fsync/s</small>`} small=${`p99 ${ms(p99)}`} spark=${rates(recent, fsyncs)[1]} color="--c2" mark="durable" />
        <${Pipe} rate=${applied} high=${2000} />
        <${Stage} id="stage-apply" name="Apply" big=${html`${short(applied)}<small> LSN/s</small>`} small=${behind ? `${whole(behind)} behind` : "nothing behind"} spark=${rates(recent, (one) => one.store.applied_lsn)[1]} color="--c4" mark="applied" warn=${behind > 1000} />
        <${Pipe} rate=${applied} high=${2000} />
        <${Stage} id="stage-memtables" name="Memtables" big=${bytes(f.memtable_bytes)} small=${f.frozen_memtables ? `${whole(f.frozen_memtables)} frozen` : "none frozen"} spark=${recent.map((one) => one.flows.memtable_bytes)} color="--c5" />
        <${Pipe} rate=${flushed} high=${5e7} />
        <${Stage} id="stage-flush" name="Flush" big=${html`${bytes(flushed)}<small>/s</small>`} small=${`${whole(f.memtable_flush_seconds_count)} so far`} spark=${rates(recent, flow("memtable_flushed_bytes_total"))[1]} color="--c6" mark="stored" />
        <${Pipe} rate=${flushed + merged} high=${5e7} back=${merged > 0} />
        <div class="stage" id="stage-files"><h3>Files</h3><p class="big">${bytes(files)}</p><p class="small">${f.compaction_running ? `compacting, ${bytes(merged)}/s` : merged ? `compacted ${bytes(merged)}/s` : "no compaction"}</p>
          <div class="levels" aria-label="bytes by level">${levels.map(([level, n]) => html`<span key=${level} title=${`level ${level}: ${bytes(n)}, ${whole(f.level_counts_by_level?.[level])} files`}><i style=${{ width: `${(n / most) * 100}%` }}></i><em>L${level}</em></span>`)}</div></div>
      </div>
      <dl class="facts"><div><dt>durable</dt><dd id="durable-lsn">LSN ${whole(s.durable_lsn)}</dd></div><div><dt>applied</dt><dd>LSN ${whole(s.applied_lsn)}</dd></div><div><dt>journal from</dt><dd>LSN ${whole(s.first_lsn)} · ${whole(f.journal_segments)} segments</dd></div>
        <div><dt>writes</dt><dd id="writes-total">${whole(s.writes)}</dd></div><div><dt>encode</dt><dd>${ms(stage("encode"))}</dd></div><div><dt>journal</dt><dd>${ms(stage("journal"))} · p50 ${ms(p50)}</dd></div><div><dt>dispatch</dt><dd>${ms(stage("dispatch"))}</dd></div>
        <div><dt>failed</dt><dd>${whole(s.flush_failures)} flushes · ${whole(f.fsync_failures_total)} fsyncs</dd></div><div><dt>workers</dt><dd>${whole(f.scheduler_workers_busy)} of ${whole(f.scheduler_workers)} busy</dd></div></dl><//>
    <div class="grid2"><${Panel} title="Writes"><${Chart} t=${charts.t} series=${[{ name: "writes/s", y: charts.y }]} format=${short} /><//>
      <${Panel} title="Bytes written"><${Chart} t=${charts.t} series=${[{ name: "bytes/s", y: charts.b, color: "--c2" }]} format=${bytes} /><//>
      <${Panel} title="Journal fsync"><${Chart} t=${charts.at} series=${[{ name: "p99", y: charts.highs, color: "--c3" }, { name: "p50", y: charts.lows, color: "--c2" }]} format=${ms} /><//>
      <${Panel} title="Flush and compaction"><${Chart} t=${charts.ft} series=${[{ name: "flushed/s", y: charts.fy, color: "--c6" }, { name: "compacted/s", y: charts.cy, color: "--c5" }]} format=${bytes} /><//>
      <${Panel} title="In memory, not yet applied"><${Chart} t=${charts.pt} series=${[{ name: "pending", y: charts.pending, color: "--c3" }, { name: "in flight", y: charts.flight, color: "--c4" }]} format=${bytes} /><//>
      <${Panel} title="Tables"><div class="chips">${last.tables.map((one) => html`<a key=${one.name} class="chip" href=${link("tables", { table: one.name })}><b>${one.name}</b><span class="dim">${one.kind} · ${short(one.rows)}</span><${State} state=${one.state} /></a>`)}</div><//></div>`;
}
