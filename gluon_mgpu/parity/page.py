"""The result of `parity` as one web page: the verdict, the curves behind it, and every finding.

The page needs no other file and no network: its pictures are inline SVG. The same result gives the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHRASES = {True: "✓ holds", False: "✗ FAILS", None: "– not shown here"}
KINDS = {True: "holds", False: "fails", None: "unshown"}
COLORS = ("#009e73", "#e69f00", "#0072b2", "#cc79a7", "#56b4e9")  # told apart by the colour-blind too
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #222; font: 16px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
main { max-width: 1000px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .8rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; }
.verdict { padding: .7rem .9rem; border-left: .4rem solid; font-size: 1.15rem; font-weight: 600; }
.verdict.holds { background: #e6f4ea; }
.verdict.fails { background: #fdecea; }
.holds { color: #14662e; }
.fails { color: #a8071a; font-weight: 600; }
.unshown, .source { color: #5a5a5a; }
.source { font-size: .85rem; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 0 2rem; }
.pictures > * { min-width: 0; max-width: 560px; container-type: inline-size; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { color: #5a5a5a; font-weight: normal; }
th, td { padding: .3rem .4rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
.accuracies { font-size: clamp(.72rem, 3.3cqi, .85rem); font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.accuracies th, .accuracies td { padding: .25rem .2rem; }
.accuracies span { white-space: nowrap; }
.findings { table-layout: fixed; }
.findings th:first-child { width: 5.6rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
dd { margin: 0; }
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Parity with the notebooks</title>
<style>{style}</style>
</head>
<body><main>
<h1>Parity with the notebooks</h1>
{verdict}
<h2>Test accuracy by epoch</h2>
<p>The band is where the accuracy of one more run would lie: around the mean of today's runs, as wide as the kept runs
differ between seeds. The notebook was one run: parity holds where its accuracy lies within the band.</p>
<div class="pictures">{accuracy}</div>
<h2>Drift</h2>
<p>How far apart the parameters come that are trained from one start on the same batches, over {steps} steps. Rounding
alone: the notebook's code from itself, with the examples of each batch in another order.</p>
<div class="pictures">{drift}</div>
<h2>All findings</h2>
{findings}
<h2>Made by</h2>
<dl>{made_by}</dl>
</main></body>
</html>
"""


def render(result: dict) -> str:
    """The page, as text. result: what parity writes as JSON, read back or not."""
    return PAGE.format(
        style=STYLE,
        verdict=_verdict(result),
        accuracy="".join(_recipe(name, facts) for name, facts in result["accuracy"].items()),
        steps=result["drift"]["steps"],
        drift=_drift(result["drift"]),
        findings=_findings(result["findings"]),
        made_by="".join(f"<dt>{_text(name)}</dt><dd>{_text(fact)}</dd>" for name, fact in result["made_by"].items()),
    )


def _verdict(result: dict) -> str:
    """What there is to know first: the verdict, how many findings it rests on, and those that fail."""
    findings, holds = result["findings"], bool(result["holds"])
    held, failed, unshown = ([f["holds"] for f in findings].count(kind) for kind in KINDS)
    counts = f"{held} hold{'s' * (held == 1)}, {failed} fail{'s' * (failed == 1)}, {unshown} not shown here"
    failing = [f"{f['check']}: {f['claim']}: {f['figure']}" for f in findings if f["holds"] is False]
    items = "".join(f"<li>{_text(line)}</li>" for line in failing)
    verdict = f'<p class="verdict {KINDS[holds]}">{PHRASES[holds][0]} {_text(result["verdict"])}</p>'
    listed = f'<ul class="fails">{items}</ul>' if failing else ""
    return f"{verdict}\n<p>Of {len(findings)} findings: {counts}.</p>\n{listed}"


def _recipe(name: str, facts: dict) -> str:
    """A recipe's picture, and its numbers."""
    seeds = list(facts["runs"])
    rows = [
        (
            epoch,
            f"{recorded:.{facts['decimals']}f}",
            *(f"{facts['runs'][seed][epoch - 1]:.4f}" for seed in seeds),
            f"{low:.4f}–{high:.4f}",
            holds,
        )
        for epoch, (recorded, low, high, holds) in enumerate(
            zip(facts["notebook"], facts["low"], facts["high"], facts["holds"]), start=1
        )
    ]
    header = ("epoch", "notebook", *(f"seed {seed}" for seed in seeds), "band", "")
    picture = _svg(f"Test accuracy by epoch of {name}", lambda axes: _draw_accuracy(axes, facts), 3)
    source = f'<p class="source">Recorded in {_text(facts["source"])}</p>'
    return f"<section><h3>{_text(name)}</h3>{picture}{_table('accuracies', header, rows)}{source}</section>"


def _drift(drift: dict) -> str:
    """Two pictures."""
    pairs = list(dict.fromkeys([*drift["apart"], *drift["step_apart"]]))
    panels = (
        ("Each running on from its own parameters", drift["rounding"], drift["apart"], drift["limit"]),
        ("Each step by itself", [drift["step_rounding"]], drift["step_apart"], drift["step_limit"]),
    )
    return "".join(
        f"<section><h3>{title}</h3>"
        + _svg(
            f"Distance by step. {title}",
            partial(_draw_drift, pairs=pairs, rounding=rounding, apart=apart, limit=limit),
            1,
        )
        + "</section>"
        for title, rounding, apart, limit in panels
    )


def _findings(findings: list[dict]) -> str:
    groups: dict[str, list[tuple]] = {}
    for f in findings:
        groups.setdefault(f["check"], []).append((f["holds"], f["claim"], f["figure"]))
    header = ("verdict", "claim", "found")
    return "\n".join(f"<h3>{_text(check)}</h3>{_table('findings', header, rows)}" for check, rows in groups.items())


def _draw_accuracy(axes: Axes, facts: dict) -> None:
    epochs = range(1, len(facts["notebook"]) + 1)
    axes.fill_between(epochs, facts["low"], facts["high"], color="#dbe7f3", linewidth=0, label="the band")
    for i, accuracies in enumerate(facts["earlier"].values()):
        axes.plot(epochs, accuracies, color="0.7", linewidth=0.4, label="kept runs" if i == 0 else None)
    for i, (seed, accuracies) in enumerate(facts["runs"].items()):
        color = COLORS[i % len(COLORS)]
        axes.plot(epochs, accuracies, color=color, marker=".", markersize=4, linewidth=1.2, label=f"seed {seed}")
    looks = {True: ("ko", "the notebook"), False: ("rX", "outside the band")}
    for kind, (look, label) in looks.items():
        points = [(e, a) for e, a, holds in zip(epochs, facts["notebook"], facts["holds"]) if holds == kind]
        if points:
            axes.plot(*zip(*points), look, markersize=7 if kind else 10, markeredgecolor="white", zorder=3, label=label)
    drawn = [a for curve in (*facts["earlier"].values(), *facts["runs"].values(), facts["notebook"]) for a in curve]
    room = 0.1 * (max(drawn) - min(drawn)) + 0.01  # a band that goes far beyond them is cut off
    axes.set(xlabel="epoch", ylabel="test accuracy", xticks=epochs, xlim=(0.8, len(epochs) + 0.2))
    axes.set_ylim(max(0, min(drawn) - room), min(1, max(drawn) + room))


def _draw_drift(
    axes: Axes, pairs: list[str], rounding: list[list[float]], apart: dict[str, list[float]], limit: float
) -> None:
    """pairs: of all pictures, so that a pair looks the same in each."""
    axes.set_yscale("log")
    for i, curve in enumerate(rounding):
        steps = range(1, len(curve) + 1)
        axes.plot(steps, curve, color="0.65", linewidth=1, label="rounding alone" if i == 0 else None)
    for pair, curve in apart.items():
        place = pairs.index(pair)
        zeros = list(curve).count(0)
        said = f": 0 at {'every step' if zeros == len(curve) else f'{zeros} of {len(curve)} steps'}" if zeros else ""
        shown = curve if any(curve) else []  # a log axis has no place for 0
        look = {"color": COLORS[place % len(COLORS)], "linewidth": max(1, 4 - 1.5 * place)}  # one may hide another
        axes.plot(range(1, len(shown) + 1), shown, label=pair + said, **look)
    axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"the limit, {limit:.1e}")
    axes.set(xlabel="step", ylabel="relative distance", xlim=(0, len(steps)))
    axes.locator_params(axis="x", integer=True)
    axes.yaxis.set_major_formatter("{x:.0e}")


def _svg(label: str, draw: Callable[[Axes], None], columns: int) -> str:
    """A picture. label: what it shows, for those who do not see it. columns: of the legend, which is below the axes."""
    import matplotlib
    from matplotlib.figure import Figure

    options = {"font.size": 9.5, "legend.fontsize": 9, "axes.autolimit_mode": "round_numbers"}
    with matplotlib.rc_context({**options, "svg.fonttype": "none", "svg.hashsalt": label}):
        figure = Figure()
        axes = figure.add_subplot()
        draw(axes)
        axes.grid(alpha=0.3)
        handles, labels = axes.get_legend_handles_labels()
        below = 0.52 + 0.2 * ceil(len(labels) / columns)  # inches
        height = 2.5 + below
        figure.set_size_inches(4.4, height)
        figure.subplots_adjust(left=0.19, right=0.96, bottom=below / height, top=1 - 0.1 / height)
        figure.legend(handles, labels, loc="lower center", ncol=columns, frameon=False, borderaxespad=0)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])  # axes_1 and the like are in every picture
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_text(label)}" ', 1)


def _table(kind: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, in a box that it may scroll in. rows: of what can be printed, and True, False or None for a verdict."""
    head = "".join(f"<th>{_text(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(cell: object) -> str:
    if cell is None or isinstance(cell, bool):
        return f'<span class="{KINDS[cell]}">{PHRASES[cell]}</span>'
    return _text(cell)


def _text(value: object) -> str:
    """A value as a reader says it, escaped for HTML."""
    if isinstance(value, bool):
        value = "yes" if value else "no"
    elif isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    return escape(str(value))
