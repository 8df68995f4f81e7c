// Draws the specs of console/charts/base.py: {traces, layout}. Colours are token names ("series-1") read from the style
// sheet, so that charts follow the system's theme. A constant `uirevision` keeps the zoom across updates.

export const SERIES = 8; // colours in tokens.css

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function themed(trace, linear) {
  const drawn = { ...trace, x: linear ? trace.x : trace.x.map((at) => new Date(at * 1000)) };
  if (trace.line) drawn.line = { ...trace.line, color: token(trace.line.color) };
  if (trace.marker) drawn.marker = { ...trace.marker, color: token(trace.marker.color) };
  if (trace.fillcolor) drawn.fillcolor = `${token(trace.fillcolor)}22`;
  return drawn;
}

function layoutOf(spec) {
  const axis = { gridcolor: token("line"), linecolor: token("line-strong"), zeroline: false, automargin: true, fixedrange: false };
  const given = spec.layout || {};
  return {
    uirevision: "keep",
    autosize: true,
    margin: { l: 44, r: 12, t: 8, b: 30 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: token("font"), size: 12, color: token("ink-2") },
    hovermode: given.x_type === "linear" ? "closest" : "x unified",
    hoverlabel: { bgcolor: token("surface"), bordercolor: token("line-strong"), font: { color: token("ink") } },
    showlegend: Boolean(given.legend), // most pages have one legend for all of their charts
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
    xaxis: given.x_type === "linear"
      ? { ...axis, rangemode: "tozero", nticks: 6, title: { text: given.x_title, standoff: 4, font: { size: 11 } } }
      : { ...axis, type: "date", tickformat: "%H:%M", nticks: 6, range: given.x_range?.map((at) => new Date(at * 1000)) },
    yaxis: { ...axis, rangemode: "tozero", ...given.yaxis, title: { text: given.y_title, standoff: 4, font: { size: 11 } } },
    ...(given.y2_title && {
      yaxis2: { ...axis, overlaying: "y", side: "right", showgrid: false, rangemode: "tozero", ...given.y2axis,
        title: { text: given.y2_title, standoff: 4, font: { size: 11 } } },
    }),
    shapes: (given.lines || []).map(lineOf),
    annotations: (given.lines || []).map(wordsOf),
  };
}

/** A threshold is a horizontal line (y), a moment a vertical one (x, epoch seconds). */
function lineOf(line) {
  const at = line.x === undefined ? null : new Date(line.x * 1000);
  const ends = at ? { yref: "paper", y0: 0, y1: 1, x0: at, x1: at } : { xref: "paper", x0: 0, x1: 1, y0: line.y, y1: line.y };
  return { type: "line", ...ends, line: { color: token(line.color), width: 1.5, dash: "dash" } };
}

function wordsOf(line, index) {
  const place = line.x === undefined
    ? { xref: "paper", x: 0.01, xshift: index * 112, y: line.y, yanchor: "top" }
    : { yref: "paper", y: 1, yanchor: "top", x: new Date(line.x * 1000), xshift: 3 };
  return { ...place, xanchor: "left", showarrow: false, text: line.text,
    font: { size: 11, color: token(line.color) }, bgcolor: token("surface"), borderpad: 1 };
}

const drawnSpecs = new Map();

export function draw(element, spec) {
  drawnSpecs.set(element, spec);
  const empty = element.querySelector(".empty");
  const hasData = spec.traces.some((trace) => trace.x.length);
  if (empty) empty.hidden = hasData;
  if (!hasData) return;
  const plot = element.querySelector(".plot");
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  window.Plotly.react(plot, spec.traces.map((trace) => themed(trace, spec.layout?.x_type === "linear")), layoutOf(spec), config);
}

/** Adds one live point at the right end. `values`: {trace key: {name, value}}; `at`: epoch seconds. */
export function extend(element, at, values) {
  const spec = drawnSpecs.get(element);
  if (!spec) return;
  if (spec.grow) addTraces(spec, values);
  for (const trace of spec.traces) {
    const value = values[trace.key]?.value;
    if (value === undefined) continue;
    if (!spec.grow && trace.live_from !== undefined) {
      // The live end is a single moving point; the minutes behind it come from the database.
      trace.x.length = trace.live_from;
      trace.y.length = trace.live_from;
    }
    trace.live_from = trace.x.length;
    trace.x.push(at);
    trace.y.push(value);
  }
  slide(spec, at);
  draw(element, spec);
}

/** A chart that is fed by live frames alone gets a trace for each new key. */
function addTraces(spec, values) {
  const known = new Set(spec.traces.map((trace) => trace.key));
  for (const [key, { name, series }] of Object.entries(values)) {
    if (known.has(key)) continue;
    const line = { color: `series-${(series % SERIES) + 1}`, width: 2, shape: "hv" };
    spec.traces.push({ ...spec.grow, key, name, type: "scatter", mode: "lines", x: [], y: [], line });
  }
}

function slide(spec, at) {
  const [from, until] = spec.layout.x_range;
  spec.layout.x_range = [at - (until - from), at];
  if (!spec.grow) return;
  for (const trace of spec.traces) {
    const old = trace.x.findIndex((when) => when >= spec.layout.x_range[0]);
    if (old > 0) {
      trace.x.splice(0, old);
      trace.y.splice(0, old);
    }
  }
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [element, spec] of drawnSpecs) {
    if (element.isConnected) draw(element, spec);
    else drawnSpecs.delete(element); // its part of the page was replaced
  }
});
