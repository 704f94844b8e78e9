"""How the report looks."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--panel:#fff;--ink:#1d2126;--soft:#687078;--rule:#e4e6e8;--good:#147a4b;
--bad:#b3362b;--ins:#e7f6ec;--del:#fdecea;--f0:#2b9a66;--f1:#2f6fb5;--f2:#8a8f98;--f3:#d9822b}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--panel:#1b1f23;--ink:#e4e7ea;--soft:#949da6;--rule:#2c3238;
--good:#5cc795;--bad:#ef8378;--ins:#16301f;--del:#3a1f1d;--f0:#5cc795;--f1:#6ea8e6;--f2:#949da6;--f3:#eba45a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1100px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:30px;line-height:1.2;margin:0 0 14px;overflow-wrap:anywhere}
h2{font-size:19px;margin:44px 0 12px}h3{font-size:15px;margin:0 0 4px;overflow-wrap:anywhere}
h4{font-size:12.5px;font-weight:500;color:var(--soft);margin:12px 0 4px;overflow-wrap:anywhere}
dl{display:flex;flex-wrap:wrap;gap:10px 32px;margin:0 0 26px}dt{font-size:12px;color:var(--soft)}
dd{margin:0;font-weight:500;overflow-wrap:anywhere}
.cards{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,150px),1fr))}
.card,article,figure,.scroll{background:var(--panel);border:1px solid var(--rule);border-radius:10px;padding:14px 16px;
margin:0 0 12px;min-width:0}
article article{padding:0;border:0;margin:0}article>h4:first-child{margin-top:0}
.card span,.card em,.note{color:var(--soft);font-size:13px;font-style:normal}
.card p{font-size:30px;line-height:1.25;margin:4px 0 2px}.note{margin:0 0 6px;overflow-wrap:anywhere}
.good{color:var(--good)}.bad{color:var(--bad)}
pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;margin:0;max-height:22em;overflow:auto;
background:var(--bg);border-radius:6px;padding:8px 0}
pre>*{display:block;padding:0 10px;white-space:pre-wrap;overflow-wrap:anywhere;text-decoration:none;min-height:1.5em}
ins{background:var(--ins)}del{background:var(--del)}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}.scroll{overflow-x:auto}
article .scroll{border:0;padding:0}
th,td{text-align:left;padding:6px 18px 6px 0;border-bottom:1px solid var(--rule);vertical-align:top}
td:first-child{white-space:nowrap}th,td{overflow-wrap:break-word}
th{font-weight:500;color:var(--soft);font-size:12px}tr:last-child td{border-bottom:0}
.bar{display:flex;gap:2px;height:8px;margin:6px 0 8px}.bar i{border-radius:2px;min-width:3px}
.f0{background:var(--f0)}.f1{background:var(--f1)}.f2{background:var(--f2)}.f3{background:var(--f3)}
svg{display:block;width:100%;height:auto}rect{fill:var(--f1)}figcaption{font-size:13px;margin-bottom:8px}
summary{cursor:pointer;font-size:13px;color:var(--soft)}a{color:var(--f1)}ul{margin:8px 0;padding-left:20px}
footer{color:var(--soft);font-size:12px;margin-top:48px}
@media(max-width:640px){main{padding:24px 14px 48px}.card,article,figure,.scroll{padding:12px}}
"""
