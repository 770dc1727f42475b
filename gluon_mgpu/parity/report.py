"""The result of `run` for a reader: the same tables as text and as a web page, which also has pictures."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterator
from html import escape
from typing import Any

WORDS = {True: "holds", False: "FAILS", None: "not shown here"}
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Parity with the notebooks</title>
<style>
body {{ max-width: 60rem; margin: 1rem auto; padding: 0 1rem; font: 1rem/1.4 system-ui, sans-serif; }}
.verdict {{ padding: .7rem; font-weight: bold; background: {color}; }}
table {{ border-collapse: collapse; font-size: .9rem; }}
td {{ padding: .2rem .6rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top; overflow-wrap: anywhere; }}
img {{ max-width: 100%; }}
</style>
<h1>Parity with the notebooks</h1>
<p class="verdict">{verdict}</p>
<p>Blue: the accuracies that one more run could have. Parity holds if the notebook's accuracies are among them.</p>
<img alt="test accuracy by epoch, one panel per recipe" src="{accuracy}">
<p>The distance from the notebook's code in float64, and its limit.</p>
<img alt="distance by step: each step by itself, and on a path" src="{drift}">
{tables}
</html>
"""

Table = tuple[str, list[list[str]]]  # title, rows


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """All tables of a result: the accuracies of each recipe, the findings of each check, and what made them."""
    for recipe, facts in result["accuracy"].items():
        header = ["", *(f"epoch {epoch}" for epoch in range(1, len(facts["notebook"]) + 1))]
        rows = [header, ["the notebook", *map(str, facts["notebook"])]]
        ours = {f"seed {seed}": accuracies for seed, accuracies in facts["runs"].items()}
        for name, values in {**ours, "lowest possible": facts["low"], "highest possible": facts["high"]}.items():
            rows.append([name, *(f"{value:.4f}" for value in values)])
        yield f"{recipe}, recorded in {facts['source']}", rows
    for check, findings in itertools.groupby(result["findings"], lambda finding: finding["check"]):
        yield check, [[WORDS[f["holds"]], f"{f['claim']}: {f['evidence']}"] for f in findings]
    yield "made by", [[name, str(value)] for name, value in result["made_by"].items()]


def text(result: dict[str, Any]) -> str:
    """The verdict and the tables as lines for a terminal."""
    lines = [result["verdict"]]
    for title, rows in tables(result):
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines += ["", title]
        lines += ["    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    """The verdict, pictures and the tables as one HTML file that needs no others."""
    parts = []
    for title, rows in tables(result):
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        parts.append(f"<h2>{escape(title)}</h2>\n<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>")
    return PAGE.format(
        verdict=escape(result["verdict"]),
        color="#e6f4ea" if result["holds"] else "#fdecea",
        accuracy=_picture(_draw_accuracy, len(result["accuracy"]), result["accuracy"]),
        drift=_picture(_draw_drift, 2, result["drift"]),
        tables="\n".join(parts),
    )


def _picture(draw: Any, panels: int, facts: dict[str, Any]) -> str:
    """A PNG picture as a data: URL. draw: fills the axes of its panels, two in a row."""
    from matplotlib.figure import Figure

    rows = -(-panels // 2)
    figure = Figure(figsize=(9, 3.5 * rows), layout="constrained")
    draw(figure.subplots(rows, 2, squeeze=False).flat, facts)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _draw_accuracy(panels: Any, recipes: dict[str, Any]) -> None:
    for axes, (name, facts) in zip(panels, recipes.items()):
        epochs = range(1, len(facts["notebook"]) + 1)
        axes.fill_between(epochs, facts["low"], facts["high"], color="#dbe7f3", label="possible")
        for seed, accuracies in facts["runs"].items():
            axes.plot(epochs, accuracies, marker=".", label=f"seed {seed}")
        axes.plot(epochs, facts["notebook"], "ko", label="the notebook")
        axes.set(title=name, xlabel="epoch", ylabel="test accuracy", xticks=epochs)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")


def _draw_drift(panels: Any, drift: dict[str, Any]) -> None:
    for axes, kind, title in zip(panels, ("step", "path"), ("each step by itself", "along a path")):
        for name, errors in drift[f"{kind}_errors"].items():
            axes.semilogy(range(1, len(errors) + 1), errors, linewidth=1, label=name)
        axes.axhline(drift[f"{kind}_limit"], color="black", linestyle="--", label="limit")
        axes.set(title=title, xlabel="step", ylabel="relative distance")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
