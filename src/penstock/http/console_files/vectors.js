// Vectors: neighbours of one, a map of them, and the index's recall.
import { html, useState } from "./preact.js";
import { read, whole } from "./live.js";
import { Table, Panel, Failed, Pick, preview, useLoad, go } from "./parts.js";

export function Vectors({ live, route }) {
  const tables = (live.last?.tables || live.hello.tables).filter((one) => one.kind === "vector").map((one) => one.name);
  const given = route.given, table = tables.includes(given.table) ? given.table : tables[0];
  if (!table) return html`<h1>Vectors</h1><p class="empty">there is no vector table yet</p>`;
  return html`<h1>Vectors</h1><${Neighbours} key=${table} table=${table} tables=${tables} given=${given} />`;
}

function Neighbours({ table, tables, given }) {
  const { data, error, loading } = useLoad(() => read("neighbours", { table, like: given.like, k: given.k, vector: given.vector }), [table, given.like, given.k, given.vector]);
  const [recall, setRecall] = useState(null), [over, point] = useState(null);
  const check = async () => { setRecall("…"); try { setRecall(await read("recall", { table, k: given.k })); } catch (e) { setRecall(e.message); } };
  const exact = data ? new Set(data.exact || []) : new Set();
  return html`<${Panel}><form class="row" onSubmit=${(event) => { event.preventDefault(); const e = event.target.elements, text = e.like.value.trim(); go("vectors", { table, k: e.k.value, ...(text.startsWith("[") ? { vector: text } : { like: text }) }); }}>
      <${Pick} label="table" value=${table} options=${tables} onChange=${(name) => go("vectors", { table: name })} /><label class="grow">like the vector of this id, or near [numbers]<input name="like" value=${given.vector || given.like || data?.query || ""} spellcheck="false" /></label>
      <label>neighbours<input name="k" type="number" min="1" max="100" value=${given.k || 10} /></label><button class="primary">Search</button></form><${Failed} error=${error} />
    ${data && html`<dl class="facts"><div><dt>vectors</dt><dd>${whole(data.about.count)}</dd></div><div><dt>dimensions</dt><dd>${whole(data.about.dimensions)}</dd></div><div><dt>distance</dt><dd>${data.about.metric}</dd></div><div><dt>index</dt><dd>${data.about.trained ? `${whole(data.about.lists)} lists, ${whole(data.about.probes)} probed` : "exact: not trained yet"}</dd></div>
      <div><dt>recall, measured</dt><dd>${data.about.recall == null ? "no query yet" : `${(data.about.recall * 100).toFixed(1)} % of ${whole(data.about.recall_queries)} queries`}</dd></div>
      <div><dt>this search</dt><dd>${data.hits.length ? `${data.found} of ${(data.exact || []).length} true neighbours` : "–"}</dd></div>
      <div><dt>recall check</dt><dd>${recall && recall.queries ? `${(recall.recall * 100).toFixed(1)} % of ${recall.queries} queries, k = ${recall.k}` : typeof recall === "string" ? recall : html`<button onClick=${check}>Check</button>`}</dd></div></dl>`}<//>
    ${data && data.map.length > 0 && html`<div class="grid2"><${Panel} title="Map" side=${html`<span class="dim">${over || "the two axes along which they differ most"}</span>`}><${Picture} data=${data} onOver=${point} onPick=${(like) => go("vectors", { table, like, k: given.k })} /><//>
      <${Panel} title="Nearest"><${Table} label="neighbours" rows=${data.hits} onOpen=${(one) => go("vectors", { table, like: one.id, k: given.k })} columns=${[{ name: "id", show: (one) => html`<b>${one.id}</b>` }, { name: "distance", right: true, mono: true, show: (one) => one.distance.toPrecision(5) }, { name: "attributes", mono: true, show: (one) => preview(one.attributes) }, { name: "exact", show: (one) => (exact.has(one.id) ? html`<span class="good">✓</span>` : html`<span class="bad">no</span>`) }]} /><//></div>`}
    ${data && !data.map.length && html`<p class="empty">${loading ? "reading …" : "the table has no vectors yet"}</p>`}`;
}

function Picture({ data, onOver, onPick }) {
  const x = (at) => 250 + at[0] * 235, y = (at) => 200 - at[1] * 185;
  const query = data.map[data.map.length - 1], near = data.map.filter((one) => one.rank != null && one.rank >= 0);
  return html`<svg class="map" viewBox="0 0 500 400" role="img" aria-label="map of vectors">
    ${near.map((one) => html`<line key=${"l" + one.id} x1=${x(query.at)} y1=${y(query.at)} x2=${x(one.at)} y2=${y(one.at)} />`)}
    ${data.map.map((one, i) => (one.rank === -1 ? html`<path key="query" class="query" d=${`M${x(one.at)} ${y(one.at) - 8}l6 8l-6 8l-6 -8z`} />` : html`<circle key=${i} class=${one.rank == null ? "" : "near"} cx=${x(one.at)} cy=${y(one.at)} r=${one.rank == null ? 2.6 : 5} onMouseEnter=${() => onOver(one.id)} onMouseLeave=${() => onOver(null)} onClick=${() => onPick(one.id)} />`))}</svg>`;
}
