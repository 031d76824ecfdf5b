"""How a batch's report looks: on wide screens and phones, in light and dark, on paper."""

CSS = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1b2230;--soft:#5d6879;--line:#e2e6ec;--track:#edf0f4;
--bar:#4f83e3;--now:#1d4fb5;--good:#177245;--goodbg:#e3f4ea;--warn:#8f5a00;--warnbg:#fdf1d8;--bad:#b3261e;--badbg:#fce8e6;
--reject:#d9534a;--hidden:#a8b1bf;--other:#8a96a8}
@media (prefers-color-scheme:dark){:root{--bg:#0e1218;--card:#161c25;--ink:#e5e9f0;--soft:#98a4b5;--line:#28313e;
--track:#212936;--bar:#5f93f0;--now:#a9c7ff;--good:#6fd29c;--goodbg:#12301f;--warn:#f0bf62;--warnbg:#33270c;--bad:#ff8f86;
--badbg:#3a1715;--reject:#ef6a61;--hidden:#566274;--other:#6c7889}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,
sans-serif;font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
main,header,footer{max-width:1080px;margin:0 auto;padding:0 20px}
header{padding-top:28px}
.brand{color:var(--soft);font-size:13px;letter-spacing:.02em}
h1{font-size:26px;line-height:1.25;margin:2px 0 10px;font-weight:650;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 2px;font-weight:650}
h3{font-size:14px;margin:0;font-weight:650;overflow-wrap:anywhere}
p{margin:6px 0}
a{color:inherit}
.note,.soft{color:var(--soft)}
.note{font-size:13.5px;margin:0 0 12px;max-width:80ch}
.pill{display:inline-block;border-radius:99px;padding:2px 11px;font-size:13px;font-weight:600;white-space:nowrap}
.good{color:var(--good)}.warn{color:var(--warn)}.bad{color:var(--bad)}
.pill.good{background:var(--goodbg)}.pill.warn{background:var(--warnbg)}.pill.bad{background:var(--badbg)}
.pill.info{background:var(--track);color:var(--soft)}
.why{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--badbg);border-left:4px solid var(--bad);
border-radius:6px;padding:10px 14px;margin:12px 0;font-size:14px}
.why.warn{background:var(--warnbg);border-color:var(--warn);color:inherit}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:14px 0 4px;font-size:13.5px}
nav a{color:var(--soft);text-decoration:none;border-bottom:1px solid var(--line)}
nav a:hover,nav a:focus{color:var(--ink);border-color:currentColor}
.tiles{display:flex;flex-wrap:wrap;gap:1px;background:var(--line);
border:1px solid var(--line);border-radius:10px;overflow:hidden;margin:14px 0}
.verdict .pill{margin-right:5px}
.tile{background:var(--card);padding:11px 14px;flex:1 1 130px}
.tile b{display:block;font-size:21px;line-height:1.3;font-weight:650}
.tile span{color:var(--soft);font-size:13px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:16px 0}
.scroll{overflow-x:auto;position:relative;margin:8px 0}
table{border-collapse:collapse;width:100%;font-size:13.5px}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:500;color:var(--soft);font-size:12.5px;white-space:nowrap}
tr>:last-child{padding-right:0}
tbody tr:last-child td{border-bottom:0}
td.n,th.n{text-align:right;white-space:nowrap}
.p{white-space:nowrap}
.any{overflow-wrap:anywhere}
code,.mono{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}
code,bdi{overflow-wrap:anywhere}
.sample{display:block;background:var(--track);border-radius:6px;padding:6px 9px;margin:4px 0;white-space:pre-wrap}
mark{background:var(--reject);color:#fff;border-radius:2px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 18px;margin:0;font-size:13.5px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
svg{display:block}
.bar{width:100%;min-width:70px;height:11px;margin-top:5px;background:var(--track);border-radius:3px;overflow:hidden}
.plot{width:100%;height:104px;border-bottom:1px solid var(--line)}
.b{fill:var(--bar)}.b.reject{fill:var(--reject)}.b.hidden{fill:var(--hidden)}.b.now{fill:var(--now)}.b.other{fill:var(--other)}
.b.t0{fill:#4f83e3}.b.t1{fill:#2aa198}.b.t2{fill:#e0a030}.b.t3{fill:#9a6bd1}.b.t4{fill:#d9534a}.b.t5{fill:#5aa454}
.b.t6{fill:#c76a9d}.b.t7{fill:#8a96a8}
g:hover>.b{opacity:.72}
.chart{margin:8px 0}
.axis{display:flex;justify-content:space-between;gap:10px;color:var(--soft);font-size:12px;margin-top:3px}
.top{color:var(--soft);font-size:12px;min-height:1em;margin-bottom:3px}
.cards{display:grid;align-items:start;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:14px}
.card{border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}
.card .stats{color:var(--soft);font-size:12.5px;margin:2px 0 6px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:8px 28px}
.two>*{min-width:0}
.legend{display:flex;flex-wrap:wrap;gap:3px 16px;font-size:12.5px;color:var(--soft);margin:4px 0 8px}
.legend svg{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px;vertical-align:-1px}
details{margin-top:8px}
summary{cursor:pointer;color:var(--soft);font-size:13px}
.g{width:22%}
.wide .g{width:12%}.card .g{width:18%}.card .bar{min-width:40px}.card td:first-child{min-width:7.5em}
.kind{margin-top:12px}.kind .soft{font-size:13px}
td code{white-space:nowrap}td .any code{white-space:normal}
footer{color:var(--soft);font-size:12.5px;padding:6px 20px 40px}
@media (max-width:560px){main,header,footer{padding-left:12px;padding-right:12px}section{padding:14px 13px}
h1{font-size:22px}.tile{padding:9px 11px}.bar{min-width:20px}th,td{padding-right:8px}table{font-size:12.5px}
th,th.n{white-space:normal;vertical-align:bottom;font-size:12px}.g{width:14%}.many .g,#rows .legend{display:none}
.tile b{font-size:18px}dl{grid-template-columns:1fr}
dd{margin-bottom:6px}.cards{grid-template-columns:1fr}
.wide thead{display:none}.wide tr{display:block;border-bottom:1px solid var(--line);padding:9px 0}
.wide td,.wide td.n{display:block;border:0;padding:1px 0;text-align:left;white-space:normal}.wide td:empty{display:none}
.wide td.n{display:inline-block;margin-right:16px}.wide .g{width:auto}
.wide td:first-child{float:left;margin-right:9px}.wide td code{white-space:normal}
.wide td[data-k]::before{content:attr(data-k) " ";color:var(--soft);font-size:12px}}
@media print{:root{--bg:#fff;--card:#fff}body{font-size:11pt}main,header,footer{max-width:none;padding:0}
nav{display:none}section{border:0;padding:0;margin:18pt 0}
.card,tr,.chart,.tiles{break-inside:avoid}h2,h3{break-after:avoid}
.scroll{overflow:visible}details::details-content{content-visibility:visible;display:block;height:auto}
svg,.pill,.why,.bar{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
