"""Formats the result of `run` as text, and as a web page with the same tables and with plots."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterator
from html import escape
from typing import Any

WORDS = {True: "holds", False: "FAILS", None: "undecided here"}
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
<p>The blue bands show the accuracies that one more run could have. The notebook's accuracies must be within them. The
last two panels show the distance from the notebook's code in float64.</p>
<img alt="test accuracy by epoch for each recipe, and drift by step" src="data:image/png;base64,{picture}">
{tables}
</html>
"""


def tables(result: dict[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yields (title, rows) per table: each recipe's accuracies, each check's findings, versions and settings."""
    for recipe, facts in result["accuracy"].items():
        header = ["", *(f"epoch {epoch}" for epoch in range(1, len(facts["notebook"]) + 1))]
        rows = [header, ["the notebook", *map(str, facts["notebook"])]]
        ours = {f"seed {seed}": accuracies for seed, accuracies in facts["runs"].items()}
        for name, values in {**ours, "lowest possible": facts["low"], "highest possible": facts["high"]}.items():
            rows.append([name, *(f"{value:.4f}" for value in values)])
        yield f"{recipe}, recorded in {facts['source']}", rows
    for check, findings in itertools.groupby(result["findings"], lambda finding: finding["check"]):
        yield check, [[WORDS[f["holds"]], f"{f['claim']}: {f['evidence']}"] for f in findings]
    yield "versions and settings", [[name, str(value)] for name, value in result["made_by"].items()]


def text(result: dict[str, Any]) -> str:
    """Format the verdict and the tables for a terminal."""
    lines = [result["verdict"]]
    for title, rows in tables(result):
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines += ["", title]
        lines += ["    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def page(result: dict[str, Any]) -> str:
    """Format the verdict, the plots and the tables as one self-contained HTML file."""
    parts = []
    for title, rows in tables(result):
        parts.append(f"<h2>{escape(title)}</h2>\n<table>")
        parts += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
        parts.append("</table>")
    color = "#e6f4ea" if result["holds"] else "#fdecea"
    picture = base64.b64encode(draw(result)).decode()
    return PAGE.format(verdict=escape(result["verdict"]), color=color, picture=picture, tables="\n".join(parts))


def draw(result: dict[str, Any]) -> bytes:
    """Draw a PNG image with one panel per recipe and two panels for drift."""
    from matplotlib.figure import Figure

    recipes, drift = result["accuracy"], result["drift"]
    rows = (len(recipes) + 1) // 2 + 1
    figure = Figure(figsize=(9, 3.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 2)
    for axes, (name, facts) in zip(panels.flat, recipes.items()):
        epochs = range(1, len(facts["notebook"]) + 1)
        axes.fill_between(epochs, facts["low"], facts["high"], color="#dbe7f3", label="possible")
        for seed, accuracies in facts["runs"].items():
            axes.plot(epochs, accuracies, marker=".", label=f"seed {seed}")
        axes.plot(epochs, facts["notebook"], "ko", label="the notebook")
        axes.set(title=name, xlabel="epoch", ylabel="test accuracy", xticks=epochs)
    for axes, kind, title in zip(panels[-1], ("step", "path"), ("each step by itself", "along the path")):
        for name, errors in drift[f"{kind}_errors"].items():
            axes.semilogy(range(1, len(errors) + 1), errors, linewidth=1, label=name)
        axes.axhline(drift[f"{kind}_limit"], color="black", linestyle="--", label="limit")
        axes.set(title=f"drift: {title}", xlabel="step", ylabel="relative distance")
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend(fontsize="small")
        else:
            axes.set_axis_off()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
