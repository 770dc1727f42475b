"""`partition` and `timeline`: the bytes agree with counted copies, and workers return what the tables show."""

import json

import mxnet as mx
import pytest
from bench import partition as bench
from bench import timeline
from mxnet import nd
from printed import pixels
from test_partition import recorded_copies

from gluon_mgpu import partition, scratch


@pytest.mark.parametrize("way", partition.WAYS)
@pytest.mark.parametrize("devices, n", [(1, 8), (2, 8), (2, 7), (3, 5)])
def test_the_bytes_are_those_of_the_copies_that_a_step_makes(way, devices, n):
    ctx, host = [mx.cpu(i) for i in range(devices)], mx.cpu(devices)
    place, train_batch = partition.WAYS[way]
    device_params = place(scratch.init_params(), ctx)
    X, y = nd.ones((n, 1, 28, 28), ctx=host), nd.ones(n, ctx=host)
    with recorded_copies() as copies:
        train_batch(X, y, device_params, ctx, 0.1)
    assert bench.bytes_moved(way, devices, n) == sum(size for source, _, size in copies if source != host)


@pytest.mark.slow
def test_a_measured_way_has_a_time_and_an_idle_share_of_each_device(monkeypatch):
    name = "network partitioning, 4 micro-batches"
    monkeypatch.setattr(bench, "WAYS", {name: bench.WAYS[name]})
    result = json.loads(json.dumps(bench.run(rounds=1, steps=2)))
    [idle] = result["ways"][name]["idle"]
    assert result["ways"][name]["step_ms"][0] > 1 and len(idle) == 2 and all(0 < share < 1 for share in idle)
    assert name in bench.table(result)


def test_a_timeline_has_the_phases_of_each_context():
    result = json.loads(json.dumps(timeline.run("highlevel", "lenet", contexts=2)))
    assert len(result["step_ms"]) == 5 and len(result["contexts"]) == 2
    for context, seconds in result["contexts"].items():
        row = next(line.split() for line in timeline.table(result).splitlines() if line.startswith(context))
        assert row[1] == f"{1000 * seconds['forward'] / 5:.2f}" and row[-1] == f"{100 * seconds['idle_share']:.1f}%"
    assert pixels(timeline.draw, result).std() > 0
