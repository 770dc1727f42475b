"""Formats the result of `run` as text and as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, BinaryIO

from gluon_mgpu.runtime import log

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
    """Draw one panel per recipe and two panels for drift, as a PNG image."""
    from matplotlib.figure import Figure

    recipes, drift = result["accuracy"], result["drift"]
    rows = (len(recipes) + 1) // 2 + 1
    figure = Figure(figsize=(9, 3.5 * rows), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False)
    for axes, (name, facts) in zip(panels.flat, recipes.items()):
        epochs = range(1, len(facts["notebook"]) + 1)
        axes.fill_between(epochs, facts["low"], facts["high"], color="#dbe7f3", label="possible")
        lines = axes.plot(epochs, list(zip(*facts["runs"].values())), color="tab:blue", marker=".", linewidth=1)
        lines[0].set_label("new runs")
        axes.plot(epochs, facts["notebook"], "ko", label="the notebook")
        axes.set(title=name, xlabel="epoch", ylabel="test accuracy", xticks=epochs)
    for axes in panels[:-1].flat:
        if axes.has_data():
            axes.legend(fontsize="small")
        else:
            axes.set_axis_off()
    titles = ("drift: single steps (the limit is for the median)", "drift: all steps so far")
    for axes, kind, title in zip(panels[-1], ("step", "path"), titles):
        # Lines can coincide, so each line is thinner than the line under it.
        for (name, errors), width in zip(drift[f"{kind}_errors"].items(), (4.5, 2.5, 1.5, 0.8)):
            axes.semilogy(range(1, len(errors) + 1), errors, linewidth=width, label=name)
        axes.axhline(drift[f"{kind}_limit"], color="black", linestyle="--", label="limit")
        axes.set(title=title, xlabel="step", ylabel="relative distance")
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    figure.legend(*panels[-1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(file, format="png", dpi=110)
