"""The results as one HTML file that needs nothing beside it: tables, charts, and what produced them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench.placement.charts import Chart, colour, svg
from bench.placement.report import COLUMNS, Measured, compared, heading, knees, of_policy, row

CHARTS = (
    ("ttft_mean", "Time to first token, mean", "s", 1, True, None),
    ("ttft_p90", "Time to first token, 90th percentile", "s", 1, True, "first_token"),
    ("goodput", "Requests within their objectives", "%", 100, False, None),
    ("tpot_mean", "Time per token after the first, mean", "ms", 1000, True, "per_token"),
    ("hit", "Prompt tokens found in the pod's cache", "%", 100, False, None),
    ("imbalance", "Requests on the busiest pod over the mean", "×", 1, False, None),
)
"""Figure, title, unit, factor, logarithmic, the objective that is drawn."""


def html(about: Mapping[str, Any], results: Sequence[Measured]) -> str:
    """`about`: title, workload, command, versions, objectives; see `bench/quality.py`."""
    policies = list(dict.fromkeys(one["policy"] for one in results))
    parts = [
        f"<h1>{escape(about['title'])}</h1><p>{escape(about['workload'])}</p>",
        _summary(about, results),
        '<ul class="legend">',
        *(f"<li {colour(number)}>{escape(name)}</li>" for number, name in enumerate(policies)),
        '</ul><div class="charts">',
        *(_figure(svg(chart), chart) for chart in charts(about, results)),
        "</div>",
        _hits(results),
        *(_table(load, [one for one in results if one["load"] == load]) for load in _loads(results)),
        _comparison(results),
        _made_by(about),
    ]
    title = escape(about["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def charts(about: Mapping[str, Any], results: Sequence[Measured]) -> list[Chart]:
    """Keys that have figures."""
    found = []
    for name, title, unit, factor, logarithmic, objective in CHARTS:
        series = {
            policy: [(one["load"], *(part * factor for part in one["figures"][name])) for one in ones]
            for policy, ones in of_policy(results).items()
        }
        if all(math.isnan(value) for points in series.values() for _, value, _ in points):
            continue
        limit = about["objectives"][objective] * factor if objective else None
        found.append(Chart(title, unit, series, logarithmic, limit))
    return found


def _summary(about: Mapping[str, Any], results: Sequence[Measured]) -> str:
    """Where each policy breaks, if it was driven that far."""
    found = knees(results, about["objectives"]["first_token"], about["good"])
    if not about["sweep"]:
        return ""
    heads = [
        "policy",
        f"p90 of TTFT passes {about['objectives']['first_token']:g} s",
        f"good falls below {about['good']:.0%}",
    ]
    rows = [[policy, *knee] for policy, knee in found.items()]
    return f"<h2>The knee: up to which load each one holds</h2>{_grid(heads, rows)}"


def _figure(drawing: str, chart: Chart) -> str:
    scale = " (logarithmic)" if chart.logarithmic else ""
    return (
        f"<figure><figcaption>{escape(chart.title)} <small>{chart.unit}{scale}</small></figcaption>{drawing}</figure>"
    )


def _hits(results: Sequence[Measured]) -> str:
    """Bars: what each expected in the caches beside what was there, at the highest load that all were driven to."""
    most = min(ones[-1]["load"] for ones in of_policy(results).values())
    last = [one for one in results if one["load"] == most]
    bars = []
    for one in last:
        actual, predicted = (100 * one["figures"][name][0] for name in ("hit", "hit_predicted"))
        marker = "" if math.isnan(predicted) else f'<i class="ghost" style="width:{predicted:.1f}%"></i>'
        label = f"{actual:.1f} %" + ("" if math.isnan(predicted) else f" <small>expected {predicted:.1f} %</small>")
        bar = f'<div class="bar"><i style="width:{actual:.1f}%"></i>{marker}</div>'
        bars.append(f"<tr><th>{escape(one['policy'])}</th><td>{bar}</td><td>{label}</td></tr>")
    caption = f"Cache hits at load {most:g}: share of the prompt tokens, and what the router expected"
    return f'<h2>{caption}</h2><div class="scroll"><table class="bars">{"".join(bars)}</table></div>'


def _table(load: float, results: Sequence[Measured]) -> str:
    heads = ["policy", *map(heading, COLUMNS)]
    return f"<h2>Load {load:g}</h2>{_grid(heads, [[one['policy'], *row(one['figures'])] for one in results])}"


def _comparison(results: Sequence[Measured]) -> str:
    heads, rows = compared(results)
    return f"<h2>Virtual clock against sockets</h2>{_grid(heads, rows)}" if rows else ""


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _made_by(about: Mapping[str, Any]) -> str:
    versions = "".join(f"<li>{escape(name)} {escape(version)}</li>" for name, version in about["versions"].items())
    return (
        f"<h2>How it was made</h2><pre>{escape(about['command'])}</pre><ul>{versions}</ul>"
        f"<p>A good request has its first token within {about['objectives']['first_token']:g} s and"
        f" {about['objectives']['per_token'] * 1000:g} ms per token after it. ± is half of the 95 % interval over"
        f" {about['seeds']} seeds; the first {about['warm_up']:.0%} of the requests of a run do not count.</p>"
    )


def _loads(results: Sequence[Measured]) -> list[float]:
    return list(dict.fromkeys(one["load"] for one in results))


STYLE = """
:root{color-scheme:light dark;--bg:#fcfcfa;--ink:#1d2129;--soft:#667;--rule:#dfe1e6;--head:#f1f2f4;
--c0:#2457d6;--c1:#d9480f;--c2:#2b8a3e;--c3:#9c36b5;--c4:#c92a5c;--c5:#0b7285;--c6:#8a6d00;--c7:#5c5f66}
@media(prefers-color-scheme:dark){:root{--bg:#14161a;--ink:#e6e8ec;--soft:#9aa1ad;--rule:#2d323b;--head:#1d2026;
--c0:#7aa2ff;--c1:#ff9159;--c2:#69db7c;--c3:#da8bf0;--c4:#ff85a8;--c5:#4fd0e5;--c6:#e6c84f;--c7:#adb5bd}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 .4em}
h2{font-size:1.1rem;margin:2em 0 .6em}
p{max-width:75ch;margin:.4em 0}
small{color:var(--soft);font-size:.85em;font-weight:400}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:10px 0;margin:14px 0 0;position:sticky;top:0;
background:var(--bg);border-bottom:1px solid var(--rule)}
.legend li::before{content:"";display:inline-block;width:.8em;height:.8em;border-radius:50%;
background:var(--c);margin-right:.45em}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:20px 28px;margin-top:18px}
figure{margin:0}figcaption{font-weight:600;margin-bottom:4px}
svg{display:block;width:100%;height:auto;overflow:visible}
.grid{stroke:var(--rule)}.axis{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.limit{stroke:var(--soft);stroke-dasharray:5 4}
.series polyline{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}
.series circle{fill:var(--c);stroke:var(--bg);stroke-width:1.5}
.series .error{stroke:var(--c);stroke-width:1.5;opacity:.4}
.again polyline{stroke-dasharray:6 4}.again circle,.legend .again::before{background:var(--bg)!important;fill:var(--bg);
stroke:var(--c);stroke-width:2;box-shadow:inset 0 0 0 2px var(--c)}
@media(max-width:600px){.axis{font-size:18px}th,td{padding:5px 7px}}
.scroll{overflow-x:auto;border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.87rem;white-space:nowrap}
th,td{padding:6px 10px;text-align:right;border-top:1px solid var(--rule)}
thead th{background:var(--head);border-top:0;color:var(--soft);font-weight:600}
th:first-child{text-align:left;position:sticky;left:0;background:var(--bg)}thead th:first-child{background:var(--head)}
tr:first-child>*{border-top:0}
.bars td{text-align:left}.bars td:nth-child(2){width:100%;min-width:140px}
.bar{position:relative;height:14px;background:var(--head);border-radius:3px}
.bar i{position:absolute;inset:0 auto 0 0;background:var(--c0);border-radius:3px}
.bar .ghost{background:none;border-right:3px solid var(--ink);border-radius:0}
pre{background:var(--head);padding:12px;border-radius:8px;overflow-x:auto;white-space:pre-wrap;word-break:break-word;font-size:.85rem}
"""
