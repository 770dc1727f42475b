"""Formats the result of `run` as text and as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, BinaryIO

from gluon_mgpu.support import log

WORDS = {True: "holds", False: "FAILS", None: "undecided here"}


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
        lines += ["", title, *(f"    {line}" for line in log.table(rows, "<"))]
    return "\n".join(lines)


def draw(result: dict[str, Any], file: BinaryIO) -> None:
    """Draw the accuracies and bands of each recipe as a PNG image."""
    from matplotlib.figure import Figure

    recipes = result["accuracy"]
    rows = (len(recipes) + 1) // 2
    figure = Figure(figsize=(9, 3.5 * rows), layout="constrained")
    for axes, (name, facts) in zip(figure.subplots(rows, 2, squeeze=False).flat, recipes.items()):
        epochs = range(1, len(facts["notebook"]) + 1)
        axes.fill_between(epochs, facts["low"], facts["high"], color="#dbe7f3", label="possible")
        lines = axes.plot(epochs, list(zip(*facts["runs"].values())), color="tab:blue", marker=".", linewidth=1)
        lines[0].set_label("new runs")
        axes.plot(epochs, facts["notebook"], "ko", label="the notebook")
        axes.set(title=name, xlabel="epoch", ylabel="test accuracy", xticks=epochs)
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(file, format="png", dpi=110)
