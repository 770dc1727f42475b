"""The cost of a step in the page "Does a second device pay off?", written a second time and fitted with NumPy."""

import json
import sys
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np


def step_row(contexts, batch_size, cores):
    """The factors of a step's four terms: the fixed cost of a context, its Python time if no core is free, the time of
    an example, and what each further working core adds to it."""
    working = min(contexts, cores)
    fixed = contexts / working
    return [fixed, fixed * (contexts >= cores), batch_size / working, batch_size * (working - 1) / working]


def fit(rows, times):
    """Find x >= 0 that minimizes the sum of squares of rows @ x / times - 1. rows: (points, terms)."""
    rows, best = rows / times[:, None], (np.inf, None)
    for terms in range(1, rows.shape[1] + 1):
        for some in combinations(range(rows.shape[1]), terms):
            x = np.zeros(rows.shape[1])
            x[list(some)] = np.linalg.lstsq(rows[:, some], np.ones(len(rows)), rcond=None)[0]
            if (x >= 0).all():
                best = min(best, (((rows @ x - 1) ** 2).sum(), x), key=lambda result: result[0])
    return best[1]


def main(file):
    """Print the measurements and the fits of MEASURED in docs/interactive/pays.html, and each fit's median and largest
    error. file: scaling.json, as `bench.py scaling --out FOLDER` writes it."""
    points = {}
    for measured in json.loads(Path(file).read_text())["points"]:
        network = "LeNet" if measured["model"] == "lenet" else "ResNet-18"
        of_fit = points.setdefault(f"{measured['impl']}, {network}", {})
        of_fit[measured["contexts"], measured["batch_size"]] = median(measured["step_ms"])
    for name, of_fit in points.items():
        sizes = [batch_size for contexts, batch_size in of_fit if contexts == 1]
        fitted = [point for point in of_fit if point[0] <= 2 and point[1] in (min(sizes), max(sizes))]
        held_out = [point for point in of_fit if point not in fitted]
        terms = fit(np.array([step_row(*point, 2) for point in fitted]), np.array([of_fit[point] for point in fitted]))
        print(f"{name}\n  terms: {[float(f'{term:.4g}') for term in terms]}")
        for title, some in (("fitted", fitted), ("heldOut", held_out)):
            print(f"  {title}: {[[*point, float(f'{of_fit[point]:.4g}')] for point in some]}")
        errors = [abs(np.dot(step_row(*point, 2), terms) / of_fit[point] - 1) for point in held_out]
        print(f"  median error {median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main(sys.argv[1])
