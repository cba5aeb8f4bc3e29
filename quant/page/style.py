"""The page's look: one style sheet, light and dark, from a phone's width up. No file or address is referred to."""

CSS = """
:root { color-scheme: light dark;
  --ground: #fbfaf7; --card: #ffffff; --ink: #1d2530; --soft: #5c6672; --line: #dfddd6;
  --own: #1f6f8b; --all: #9aa7b3; --good: #2b7a55; --fair: #9a6700; --poor: #b42318;
  --band: #1f6f8b22; --bar: #8195a6; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #14181d; --card: #1c2228; --ink: #e8eaed; --soft: #9da8b3; --line: #323a43;
  --own: #5bb6d4; --all: #66727e; --good: #63c397; --fair: #e0ae4b; --poor: #f2837a;
  --band: #5bb6d42b; --bar: #75879a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.55rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .3rem; }
p { margin: .3rem 0 .8rem; max-width: 54rem; }
.soft, .note { color: var(--soft); } .note { font-size: .88rem; }
code, .name { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .92em;
  overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.1rem 0; }
.tile, .todo, details { background: var(--card); border: 1px solid var(--line); border-radius: .55rem; }
.tile { padding: .65rem .85rem; min-width: 0; overflow-wrap: anywhere; }
.tile b { display: block; font-size: 1.45rem; line-height: 1.25;
  font-variant-numeric: tabular-nums; } .tile span { color: var(--soft); font-size: .85rem; }
.todo { padding: .7rem .95rem; margin: .6rem 0; border-left: .3rem solid var(--soft); }
.todo p { margin: .15rem 0; } code { color: var(--own); }
.good { color: var(--good); } .fair { color: var(--fair); } .poor { color: var(--poor); }
.todo.fair { border-left-color: var(--fair); color: inherit; } .todo.poor { border-left-color: var(--poor);
  color: inherit; }
.chart { position: relative; margin: .6rem 0 .2rem 2.3rem; height: 13rem; border-left: 1px solid var(--line); }
.chart svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.chart i { position: absolute; right: 100%; margin-right: .4rem; transform: translateY(50%); font: .78rem system-ui;
  color: var(--soft); font-variant-numeric: tabular-nums; }
.ends { display: flex; justify-content: space-between; gap: 1rem; margin-left: 2.3rem; }
.ends > * { max-width: 48%; }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .88rem; color: var(--soft); }
.key span::before { content: ""; display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem;
  margin-right: .4rem; vertical-align: -.08rem; background: var(--c); }
details { margin: .45rem 0; } summary { cursor: pointer; padding: .55rem .8rem; display: grid; gap: .1rem .9rem;
  grid-template-columns: minmax(0, 1fr) auto; align-items: center; list-style: none; }
summary::-webkit-details-marker { display: none; }
summary .name { font-weight: 600; } summary .own { font-variant-numeric: tabular-nums; font-weight: 600; }
summary .why { font-size: .88rem; color: var(--soft); grid-column: 1 / -1; }
.meter { grid-column: 1 / -1; height: .4rem; border-radius: .2rem; background: var(--line); overflow: hidden; }
.meter span { display: block; height: 100%; background: currentColor; }
.inside { padding: 0 .8rem .8rem; border-top: 1px solid var(--line); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(6.7rem, 1fr)); gap: .4rem .8rem;
  margin: .6rem 0; } .facts dt { color: var(--soft); font-size: .82rem; } .facts dd { margin: 0;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.histogram { height: 6.2rem; margin: .6rem 0 .1rem; position: relative; }
.histogram svg { width: 100%; height: 100%; display: block; }
.scale { display: flex; justify-content: space-between; font-size: .8rem; color: var(--soft);
  font-variant-numeric: tabular-nums; }
table { width: 100%; border-collapse: collapse; font-size: .9rem; } th { text-align: left; color: var(--soft);
  font-weight: 500; } td, th { padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; } .number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
@media (min-width: 46rem) { summary { grid-template-columns: minmax(8rem, 1.3fr) 8rem minmax(0, 2.2fr) 5.2rem; }
  summary .why { grid-column: auto; order: 3; } .meter { grid-column: auto; order: 2; } summary .own { order: 4;
  text-align: right; } }
@media (max-width: 45.99rem) { thead { display: none; } tr { display: grid; grid-template-columns: 1fr auto;
  padding: .5rem 0; border-bottom: 1px solid var(--line); } td { border: 0; padding: .05rem 0; }
  td.why { grid-column: 1 / -1; color: var(--soft); } td.name { font-weight: 600; }
  td.type { grid-column: 1; } }
"""
