// Draws what console/charts/experiments.py shaped: comparisons, whose x axis is a quantity or a name and not the time (those
// are charts.js). Colours are names of tokens, so that a change of the system's theme redraws.

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const CONFIG = { responsive: true, displaylogo: false, displayModeBar: false };
const drawn = new Map();

function themed(trace) {
  const found = { ...trace };
  if (trace.line) found.line = { ...trace.line, color: token(trace.line.color) };
  if (trace.marker) found.marker = { ...trace.marker, color: token(trace.marker.color) };
  if (trace.error_y) found.error_y = { ...trace.error_y, color: token("ink-2"), thickness: 1.2, width: 3 };
  return found;
}

/** An SLO is a dashed line across (y) or upright (x), with its words. */
function line(each) {
  const ends = each.x === undefined
    ? { xref: "paper", x0: 0, x1: 1, y0: each.y, y1: each.y }
    : { yref: "paper", y0: 0, y1: 1, x0: each.x, x1: each.x };
  return { type: "line", ...ends, line: { color: token(each.color), width: 1.5, dash: "dash" } };
}

/** Words of several upright lines stand one above the other: they may be close. */
const STEP = 0.09;

function words(each, index) {
  if (each.beyond) {
    const place = { xref: "paper", yref: "paper", x: 1, xanchor: "right", y: 0.03 + index * STEP, yanchor: "bottom" };
    return { ...place, showarrow: false, text: each.text, font: { size: 11, color: token(each.color) }, bgcolor: token("surface"), borderpad: 1 };
  }
  const place = each.x === undefined
    ? { xref: "paper", x: 1, xanchor: "left", xshift: 3, y: each.y, yanchor: index ? "top" : "bottom" }
    : { yref: "paper", y: 0.03 + index * STEP, yanchor: "bottom", x: each.x, xanchor: each.left ? "right" : "left", xshift: each.left ? -3 : 3 };
  return { ...place, showarrow: false, text: each.text, font: { size: 11, color: token(each.color) }, bgcolor: token("surface"), borderpad: 1 };
}

function layoutOf(given) {
  const axis = { gridcolor: token("line"), linecolor: token("line-strong"), zeroline: false, automargin: true };
  const titled = (text) => ({ title: { text, standoff: 6, font: { size: 11 } } });
  const lines = given.lines || [];
  return {
    uirevision: "keep",
    autosize: true,
    margin: { l: 48, r: lines.some((each) => each.y !== undefined) ? 62 : 12, t: 8, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: token("font"), size: 12, color: token("ink-2") },
    hovermode: given.hovermode || "x unified",
    hoverlabel: { bgcolor: token("surface"), bordercolor: token("line-strong"), font: { color: token("ink") } },
    barmode: given.barmode || "group",
    bargap: 0.35,
    showlegend: false, // the page has one legend for all of them
    xaxis: { ...axis, ...xaxisOf(given.xaxis), ...titled(given.x_title) },
    yaxis: { ...axis, rangemode: "tozero", ...given.yaxis, ...titled(given.y_title) },
    shapes: lines.filter((each) => !each.beyond).map(line),
    annotations: lines.map(words),
  };
}

/** Every name under its own group: Plotly itself would leave out every second one. It turns those that do not fit. */
const EACH_NAME = { tickmode: "linear", tick0: 0, dtick: 1, tickfont: { size: 11 } };

function xaxisOf(given) {
  return given?.type === "category" ? { ...EACH_NAME, ...given } : { nticks: 8, ...given };
}

const hasData = (spec) => spec.traces.some((trace) => trace.x.length);

export function draw(element, spec) {
  drawn.set(element, spec);
  const empty = element.querySelector(".empty");
  const plot = element.querySelector(".plot");
  empty.hidden = hasData(spec);
  plot.hidden = !hasData(spec);
  if (hasData(spec)) window.Plotly.react(plot, spec.traces.map(themed), layoutOf(spec.layout), CONFIG);
}

/** As it is drawn, on a ground of its own, with a title and a legend: a file that can stand alone. */
export function savePng(element, title, filename) {
  const spec = drawn.get(element);
  if (!spec || !hasData(spec)) return;
  const ground = token("surface");
  const layout = { ...layoutOf(spec.layout), paper_bgcolor: ground, plot_bgcolor: ground, showlegend: true };
  const size = { width: 1000, height: 560 };
  Object.assign(layout, size, { title: { text: title, font: { size: 16 } }, margin: { l: 80, r: 30, t: 60, b: 70 } });
  window.Plotly.downloadImage({ data: spec.traces.map(themed), layout }, { format: "png", ...size, filename });
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [element, spec] of drawn) draw(element, spec);
});
