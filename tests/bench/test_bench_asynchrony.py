"""`async` and `copy` measure every row in every round; ratios and rates agree with values computed by hand."""

import json

import pytest
from bench import asynchrony, harness


@pytest.mark.parametrize("what, devices, rows", [("async", ["cpu(0)", "cpu(2)"], 4), ("copy", ["cpu(0)"], 5)])
def test_a_worker_measures_every_row_in_every_round(what, devices, rows, monkeypatch):
    monkeypatch.setattr(asynchrony, "ON_CPU", (16, 3))
    monkeypatch.setattr(harness, "start", lambda name, job: asynchrony.work(**job.arguments))
    result = json.loads(json.dumps(asynchrony.run(what, "0,2", "cpu", rounds=2)))
    assert (result["devices"], result["size"], result["products"]) == (devices, 16, 3)
    assert len(result["rows"]) == rows
    for seconds in result["rows"].values():
        assert len(seconds) == 2 and all(s > 0 for s in seconds)


def rows_of(names, seconds):
    """For each row, the cells that the table shows: 10 products on each of two devices."""
    facts = {"devices": ["cpu(0)", "cpu(1)"], "names": "x", "size": 1000, "products": 10}
    lines = asynchrony.table({**facts, "rows": dict(zip(names, seconds))}).splitlines()
    return [next(line for line in lines if line.startswith(name))[len(name) :].split() for name in names]


def test_a_ratio_is_of_one_round_and_a_rate_of_the_median():
    # One device: 10 products of 2 GFLOP in the median's 2 s. Ratios: 0.5/2, 0.1/1, 1/5 -> 0.2; 6/2, 2/1, 9/5 -> 2;
    # 2/2, 3/1, 2/5 -> 1. Both devices: 20 products in 6 s and in 2 s.
    names = (asynchrony.CALLS, asynchrony.BASE, *asynchrony.ALL_DEVICES)
    assert rows_of(names, [[0.5, 0.1, 1], [2, 1, 5], [6, 2, 9], [2, 3, 2]]) == [
        ["0.5000", "(0.1000-1.0000)", "0.20"],
        ["2.0000", "(1.0000-5.0000)", "10.0", "1.00"],
        ["6.0000", "(2.0000-9.0000)", "6.7", "2.00"],
        ["2.0000", "(2.0000-3.0000)", "20.0", "1.00"],
    ]
    copies = rows_of((asynchrony.BASE, asynchrony.COPIES), [[2, 2, 2], [0.02, 0.04, 0.02]])[1]
    assert copies == ["0.0200", "(0.0200-0.0400)", "0.01"]
