// Unpacks Plotly, then draws the figures in the colours of the theme, and again when the theme, the width or the medium
// changes.
"use strict";
(async () => {
  const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";
  const VALUE = Object.fromEntries([...DIGITS].map((digit, value) => [digit, value]));

  // The bytes of base 85 as Python writes it (RFC 1924): five digits stand for four bytes, fewer at the end for fewer.
  const bytes = (text) => {
    const out = new Uint8Array(Math.ceil(text.length / 5) * 4);
    for (let i = 0, at = 0; i < text.length; i += 5) {
      let number = 0;
      for (let j = 0; j < 5; j++) number = number * 85 + (i + j < text.length ? VALUE[text[i + j]] : 84);
      for (let shift = 24; shift >= 0; shift -= 8) out[at++] = (number / 2 ** shift) & 255;
    }
    return out.subarray(0, Math.floor((text.length * 4) / 5));
  };
  const unpacked = (id) => {
    const packed = new Blob([bytes(document.getElementById(id).textContent)]).stream();
    return new Response(packed.pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.body.append(script); // the content security policy knows its hash
  const figures = JSON.parse(await unpacked("figures"));

  const LEGIBLE = 20; // pixels of a cell
  const axis = {
    gridcolor: "@grid", showgrid: true, linecolor: "@grid", showline: true, zeroline: false, automargin: true, fixedrange: true, ticks: "",
    tickfont: { color: "@muted", size: 11 },
  };
  const template = { // what all figures have in common
    layout: {
      margin: { l: 8, r: 8, t: 8, b: 8 }, showlegend: false, dragmode: false, xaxis: axis, yaxis: axis,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { size: 12, color: "@ink" }, hoverlabel: { font: { size: 12 } },
    },
  };
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");

  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const sequential = () => [0, 1, 2, 3, 4, 5].map((i) => [i / 5, colour("s" + i)]);

  // A copy of a figure in which "@name", where a colour stands, is the theme's colour of that name.
  const painted = (value, key) => {
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map((v) => painted(v, key)) : value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v, k)]));
    }
    if (typeof value !== "string" || value[0] !== "@" || !/color/i.test(key)) return value;
    return value === "@sequential" ? sequential() : colour(value.slice(1));
  };

  const draw = () => {
    const family = getComputedStyle(document.body).fontFamily;
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = painted(figure, "");
      layout.template = painted(template, "");
      layout.template.layout.font.family = family;
      layout.width = document.getElementById(id).clientWidth;
      for (const trace of data) {
        // Numbers that would be too small to read are left out.
        if (trace.texttemplate && layout.width / trace.z[0].length < LEGIBLE) delete trace.texttemplate;
      }
      Plotly.react(id, data, layout, { displayModeBar: false, responsive: false, scrollZoom: false });
    }
  };

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const show = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    draw();
  };
  const print = (on) => {
    if (root.classList.contains("printing") !== on) {
      root.classList.toggle("printing", on);
      draw();
    }
  };

  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  dark.addEventListener("change", show);
  paper.addEventListener("change", (event) => print(event.matches));
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  let width = root.clientWidth;
  addEventListener("resize", () => {
    if (root.clientWidth !== width) {
      width = root.clientWidth;
      draw();
    }
  });
  show();
})();
