#include "apps/report/page.h"

namespace tessera::apps {

const char* const kReportMark = "<!doctype html>\n<!-- tessera-report -->\n";

const char* const kReportStyle = R"css(
:root{color-scheme:light dark;
--bg:#f6f7f9;--card:#fff;--ink:#1b2230;--soft:#5b6577;--rule:#dfe3ea;--accent:#0b62c4;
--c0:#0b62c4;--c1:#c2480a;--c2:#0a7a58;--c3:#a3308c;--c4:#6b4fd8;--c5:#8a6a00;--c6:#c01f3c;--c7:#3b7487;
--m0:#2f6fde;--m1:#e0862b;--m2:#8a5fd6;--m3:#1f9d83;--m4:#d1537f;--m5:#8b95a5;--m6:#b59a1a;--m7:#4aa3c7;
--h0:#eef3fb;--h1:#d9e5f7;--h2:#bfd4f1;--h3:#a1c0ea;--h4:#80a9e1;--h5:#5f91d6;--h6:#4178c7;--h7:#2a60b2;--h8:#194a97;--h9:#0c3578}
@media(prefers-color-scheme:dark){:root{
--bg:#10141b;--card:#181e28;--ink:#e8ecf3;--soft:#9aa6b8;--rule:#2b3442;--accent:#6cb4ff;
--c0:#6cb4ff;--c1:#ff9f5f;--c2:#4fd3a5;--c3:#f08fd6;--c4:#b5a4ff;--c5:#e2c350;--c6:#ff8494;--c7:#86d2e2;
--m0:#6a9dff;--m1:#f2a65a;--m2:#b794f6;--m3:#45c9ad;--m4:#f07fa6;--m5:#8e9aab;--m6:#d9c04a;--m7:#74c3e6;
--h0:#16202f;--h1:#1b2b43;--h2:#213a5b;--h3:#284a76;--h4:#305c93;--h5:#3b70b0;--h6:#4b86cb;--h7:#669fe0;--h8:#8bbaf0;--h9:#b9d7fb}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1500px;margin:0 auto;padding:1.5rem clamp(.75rem,3vw,2rem) 4rem}
h1{font-size:clamp(1.25rem,2.4vw,1.7rem);line-height:1.25;margin:0 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2.2rem 0 .8rem}
p{margin:.3rem 0}
.soft,.note{color:var(--soft)}
.note{font-size:.85rem;margin:.5rem 0 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.75rem;margin:1.2rem 0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:.7rem .9rem;min-width:0}
.tile b{display:block;font-size:1.3rem;font-weight:650;font-variant-numeric:tabular-nums;line-height:1.3;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:.82rem}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,28rem),1fr));gap:1rem}
.wide{grid-column:1/-1}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:.9rem 1rem .8rem;min-width:0}
figcaption{font-weight:600;margin-bottom:.6rem}
.plot{display:grid;grid-template-columns:calc(var(--yw)*.92 + .5rem) minmax(0,1fr);font-size:.78rem;color:var(--soft);font-variant-numeric:tabular-nums}
.ys{position:relative}
.ys span{position:absolute;right:.5rem;transform:translateY(-50%);white-space:nowrap;max-width:12em;overflow:hidden;text-overflow:ellipsis}
.canvas{position:relative;height:clamp(190px,24vw,260px);border-left:1px solid var(--rule);border-bottom:1px solid var(--rule);touch-action:pan-y;cursor:crosshair;overflow:visible}
.wide .canvas{height:clamp(200px,26vw,320px)}
.canvas:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.heat .canvas{height:clamp(120px,calc(var(--rows)*1.15rem),420px)}
.canvas svg{position:absolute;inset:0;width:100%;height:100%;display:block;overflow:visible}
.xs{grid-column:2;position:relative;height:1.4rem}
.xs span{position:absolute;top:.25rem;transform:translateX(-50%);white-space:nowrap}
.xs .first{transform:none}.xs .last{transform:translateX(-100%)}
.xname{grid-column:2;text-align:center}
svg path{vector-effect:non-scaling-stroke}
path.grid{stroke:var(--rule);stroke-width:1;fill:none}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.faint{opacity:.3;stroke-width:1}
.dashed{stroke-dasharray:5 4}
.dots{fill:none;stroke-width:7;stroke-linecap:round}
.area{stroke:none;opacity:.88}
.marks{fill:none;stroke:var(--soft);stroke-width:1;stroke-dasharray:3 3}
.mark{position:absolute;top:2px;padding-left:3px;font-size:.7rem;white-space:nowrap;pointer-events:none;color:var(--ink);opacity:.8}
.mark.left{transform:translateX(-100%);padding:0 3px 0 0}
.cursor{position:absolute;top:0;bottom:0;width:0;border-left:1px solid var(--soft);pointer-events:none}
.dot{position:absolute;width:9px;height:9px;margin:-5px 0 0 -5px;border-radius:50%;border:2px solid var(--card);pointer-events:none}
.tip{position:absolute;top:6px;z-index:3;background:var(--card);color:var(--ink);border:1px solid var(--rule);border-radius:8px;box-shadow:0 4px 14px #0003;padding:.4rem .6rem;pointer-events:none;white-space:nowrap;max-width:90vw}
.tip p{margin:0;display:flex;gap:.5rem;align-items:center;justify-content:space-between}
.tip i,.legend i{display:inline-block;width:.7rem;height:.7rem;border-radius:3px;flex:none}
.tip span{overflow:hidden;text-overflow:ellipsis;max-width:16em;margin-right:auto}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:0 0 .6rem;padding:0;font-size:.85rem}
.legend li{display:flex;align-items:center;gap:.4rem;overflow-wrap:anywhere}
.runs{position:sticky;top:0;z-index:5;background:var(--bg);display:flex;flex-wrap:wrap;gap:.4rem;padding:.6rem 0;border-bottom:1px solid var(--rule)}
.runs button{font:inherit;font-size:.88rem;display:flex;align-items:center;gap:.45rem;background:var(--card);color:var(--ink);border:1px solid var(--rule);border-radius:99px;padding:.2rem .75rem;cursor:pointer;overflow-wrap:anywhere;text-align:left}
.runs button[aria-pressed=false]{opacity:.45;text-decoration:line-through}
.runs i{width:.8rem;height:.8rem;border-radius:50%;flex:none}
figure:has(.bars){align-self:start}
.bars{display:grid;grid-template-columns:minmax(3rem,max-content) minmax(0,1fr) max-content;gap:.45rem .6rem;align-items:center;font-size:.85rem}
.bar{display:contents}
.bar span{overflow-wrap:anywhere;max-width:14rem}
.bar b{display:flex;height:1.3rem;border-radius:4px;overflow:hidden}
.bar em{font-style:normal;font-variant-numeric:tabular-nums;color:var(--soft)}
.ramp{display:flex;align-items:center;gap:.5rem;font-size:.78rem;color:var(--soft);margin:.5rem 0 0}
.ramp i{display:inline-block;width:1.2rem;height:.7rem}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.45rem .8rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
tr:last-child td{border-bottom:0}
thead th{color:var(--soft);font-weight:600;font-size:.82rem}
tbody th.code{white-space:nowrap}
td.code,th.code{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:.82rem;text-align:left;overflow-wrap:anywhere;min-width:7rem}
td.code{white-space:pre-wrap}
td i{display:inline-block;width:.7rem;height:.7rem;border-radius:50%;margin-right:.5rem}
details{background:var(--card);border:1px solid var(--rule);border-radius:10px;margin:.6rem 0;padding:.5rem .9rem}
summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}
pre{overflow-x:auto;font:.8rem/1.5 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;margin:.6rem 0}
)css"
                                 R"css(
.c0{--k:var(--c0)}.c1{--k:var(--c1)}.c2{--k:var(--c2)}.c3{--k:var(--c3)}.c4{--k:var(--c4)}.c5{--k:var(--c5)}.c6{--k:var(--c6)}.c7{--k:var(--c7)}
.m0{--k:var(--m0)}.m1{--k:var(--m1)}.m2{--k:var(--m2)}.m3{--k:var(--m3)}.m4{--k:var(--m4)}.m5{--k:var(--m5)}.m6{--k:var(--m6)}.m7{--k:var(--m7)}
.h0{--k:var(--h0)}.h1{--k:var(--h1)}.h2{--k:var(--h2)}.h3{--k:var(--h3)}.h4{--k:var(--h4)}.h5{--k:var(--h5)}.h6{--k:var(--h6)}.h7{--k:var(--h7)}.h8{--k:var(--h8)}.h9{--k:var(--h9)}
.line,.dots{stroke:var(--k)}
.area,svg [class^=h]{fill:var(--k)}
i,.dot{background:var(--k)}
.legend i{background:var(--k)}
.hide0 .canvas .c0,.hide1 .canvas .c1,.hide2 .canvas .c2,.hide3 .canvas .c3,.hide4 .canvas .c4,.hide5 .canvas .c5,.hide6 .canvas .c6,.hide7 .canvas .c7{display:none}
@media print{.runs{position:static}figure{break-inside:avoid}}
)css";

const char* const kReportScript = R"js(
"use strict";
(() => {
  const units = (v, step, names) => {
    let i = 0;
    while (Math.abs(v) >= step && i < names.length - 1) { v /= step; ++i; }
    return String(+v.toPrecision(4)) + names[i];
  };
  const words = (kind, v) => {
    if (v === null || v === undefined) return "none";
    if (kind === "bytes") return units(v, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
    if (kind === "count") return units(v, 1000, ["", "k", "M", "G", "T"]);
    if (kind === "ms") return +v.toPrecision(4) + " ms";
    if (kind === "percent") return +(100 * v).toPrecision(3) + " %";
    return String(+v.toPrecision(6));
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  };
  const make = (parent, tag, name, text) => {
    const e = parent.appendChild(document.createElement(tag));
    if (name) e.className = name;
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const isHidden = color => document.body.classList.contains("hide" + color.slice(1)) && color[0] === "c";

  for (const canvas of document.querySelectorAll(".canvas")) {
    const data = JSON.parse(canvas.querySelector("script").textContent);
    let parts = [], at = null;
    const clear = () => { for (const p of parts) p.remove(); parts = []; };
    const tip = (fraction, head, rows) => {
      const box = make(canvas, "div", "tip");
      box.setAttribute("role", "status");
      make(box, "p", "", head).style.fontWeight = 600;
      for (const [color, name, value] of rows) {
        const row = make(box, "p");
        if (color) make(row, "i", color);
        make(row, "span", "", name);
        make(row, "b", "", value);
      }
      const width = canvas.clientWidth, room = width - box.offsetWidth;
      const x = fraction * width;
      const left = x + 14 + box.offsetWidth <= width ? x + 14 : x - 14 - box.offsetWidth;
      box.style.left = Math.max(Math.min(0, room), left) + "px";
      parts.push(box);
    };
    const cursor = fraction => {
      const line = make(canvas, "div", "cursor");
      line.style.left = 100 * fraction + "%";
      parts.push(line);
    };
    const showLines = x => {
      clear();
      const [x0, x1] = data.xs, [y0, y1] = data.ys;
      const shown = data.lines.filter(l => l.x.length && !isHidden(l.color));
      if (!shown.length) return;
      let best = null;
      for (const l of shown) {
        const i = nearest(l.x, x);
        if (best === null || Math.abs(l.x[i] - x) < Math.abs(best - x)) best = l.x[i];
      }
      at = best;
      const fraction = (best - x0) / (x1 - x0);
      cursor(fraction);
      const rows = [];
      let sum = 0;
      const reach = (x1 - x0) / 60;
      for (const l of shown) {
        const i = nearest(l.x, best), y = l.y[i];
        if (Math.abs(l.x[i] - best) > reach) continue;
        rows.push([l.color, l.name, words(data.kind, y)]);
        if (y === null || (data.log && y <= 0)) continue;
        sum += y;
        const level = data.stacked ? sum : y;
        const part = ((data.log ? Math.log10(level) : level) - y0) / (y1 - y0);
        const dot = make(canvas, "div", "dot " + l.color);
        dot.style.left = 100 * (l.x[i] - x0) / (x1 - x0) + "%";
        dot.style.top = 100 * (1 - part) + "%";
        parts.push(dot);
      }
      if (data.stacked) rows.reverse(), rows.push(["", "together", words(data.kind, sum)]);
      const said = data.xlog ? String(+(10 ** best).toPrecision(3)) : Math.round(best).toLocaleString("en");
      tip(fraction, data.x + " " + said, rows);
    };
    const showCell = (fx, fy) => {
      clear();
      const column = Math.min(data.begins.length - 1, Math.floor(fx * data.begins.length));
      const row = Math.min(data.rows.length - 1, Math.floor(fy * data.rows.length));
      cursor((column + 0.5) / data.begins.length);
      tip(fx, data.x + " " + Math.round(data.begins[column]).toLocaleString("en"),
          [["", data.rows[row], words("plain", data.cells[row][column])]]);
    };
    const follow = event => {
      const box = canvas.getBoundingClientRect();
      const fx = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
      const fy = Math.min(0.9999, Math.max(0, (event.clientY - box.top) / box.height));
      if (data.heat) showCell(fx, fy); else showLines(data.xs[0] + fx * (data.xs[1] - data.xs[0]));
    };
    canvas.addEventListener("pointermove", follow);
    canvas.addEventListener("pointerdown", follow);
    canvas.addEventListener("pointerleave", clear);
    canvas.addEventListener("blur", clear);
    canvas.addEventListener("keydown", event => {
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (data.heat || !step) return;
      event.preventDefault();
      const xs = data.lines[0].x;
      const i = at === null ? (step > 0 ? -1 : xs.length) : nearest(xs, at);
      showLines(xs[Math.min(xs.length - 1, Math.max(0, i + step))]);
    });
  }
  for (const button of document.querySelectorAll(".runs button")) {
    button.addEventListener("click", () => {
      const isShown = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!isShown));
      document.body.classList.toggle("hide" + button.dataset.color, isShown);
    });
  }
})();
)js";

}  // namespace tessera::apps
