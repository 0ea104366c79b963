// Files of a chart: its values as CSV, its picture as PNG. Both are made by the page itself.
"use strict";

const MARGIN = 12;
const LINE_HEIGHT = 18;

// A cell of a CSV file. A text that begins like a formula, as a logged name may, gets an apostrophe,
// so that no spreadsheet runs it.
function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (isNumber(value)) return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function csvOf({ title, axis, lines, stepAt }) {
  const [xs, ...columns] = dataOf({ lines });
  const names = lines.map(({ name }) => (name ? `${title}: ${name}` : title));
  const head = axis === "time" ? ["time", "unix_s", "step"] : ["step"];
  const rows = xs.map((x, i) => [
    ...(axis === "time" ? [timeOf(x).toISOString(), x, stepAt(x)] : [x]), ...columns.map((ys) => ys[i])]);
  return [[...head, ...names], ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";
}

// The plot with its title and the names of its lines, on the page's ground.
function pictureOf({ u, chart }, job) {
  const plot = u.ctx.canvas;
  const scale = devicePixelRatio;
  const legend = chart.lines.filter(({ name }) => name);
  const picture = h("canvas", { width: plot.width + 2 * MARGIN * scale,
    height: plot.height + (2 * MARGIN + LINE_HEIGHT * (1 + legend.length)) * scale });
  const to = picture.getContext("2d");
  to.scale(scale, scale);
  to.fillStyle = colour("--surface");
  to.fillRect(0, 0, picture.width, picture.height);
  to.textBaseline = "top";
  to.font = FONT.replace("11px", "600 13px");
  to.fillStyle = colour("--text");
  to.fillText(`${job}: ${chart.title}${chart.axis === "step" ? ", over steps" : ""}`, MARGIN, MARGIN);
  to.drawImage(plot, MARGIN, MARGIN + LINE_HEIGHT, plot.width / scale, plot.height / scale);
  to.font = FONT;
  legend.forEach((each, i) => {
    const y = MARGIN + LINE_HEIGHT * (1 + i) + plot.height / scale;
    to.fillStyle = colour(each.colour);
    to.fillRect(MARGIN, y + 5, 8, 8);
    to.fillStyle = colour("--text");
    to.fillText(each.name, MARGIN + 14, y + 3);
  });
  return new Promise((done) => picture.toBlob(done, "image/png"));
}

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name.replace(/[^\w.-]+/g, "-") }).click();
  // The browser has begun to read it by then.
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-export]");
  const plot = button && plots.get(button.closest("figure"));
  if (!plot) return;
  const { job } = page.state.job.detail.summary;
  const blob = button.dataset.export === "csv"
    ? new Blob([csvOf(plot.chart)], { type: "text/csv" }) : await pictureOf(plot, job);
  save(blob, `${job}-${plot.chart.title}.${button.dataset.export}`);
});
