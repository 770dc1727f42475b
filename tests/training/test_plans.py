"""The plan of a tuned network is measured once per machine, kept in the cache, and recorded with the run."""

import json

import mxnet as mx
import pytest

from gluon_mgpu import highlevel
from gluon_mgpu.distributed.workers import Workers
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import plans, records, tuning
from gluon_mgpu.training.plans import DEFAULT, PLANS, Plan
from gluon_mgpu.training.settings import Settings


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The path of tuning.json in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/gluon_mgpu/tuning.json"


@pytest.fixture
def measured(monkeypatch):
    """measured(plan) makes every measurement find this plan to be the fastest. Returns a list of the measured cases."""
    cases = []

    def set_up(plan):
        def measure(net, ctx, examples, forward_backward):
            cases.append(examples)
            return {other: [1.0 if other == plan else 2.0] * 3 for other in PLANS}

        monkeypatch.setattr(tuning, "measure", measure)
        return cases

    return set_up


def chosen(k=2, batch_size=256, **options):
    return highlevel.Replicas([mx.cpu(i) for i in range(k)], Settings(batch_size), **options).own_config["tune"]


def test_a_plan_is_measured_once_for_each_size_of_the_shards(cache, measured, capfd):
    cases, plan = measured(Plan(16, 32)), Plan(16, 32)
    for batch_size in (256, 256, 250, 130, 128, 10_000, 512, 3, 64):
        assert chosen(2, batch_size) == plan
    assert cases == [128, 64, 32]
    assert capfd.readouterr().err.count("tuned lenet") == len(cases)
    assert len(plans.read()) == len(cases)


def test_with_several_workers_nothing_is_measured_and_worker_0s_plan_is_used(cache, measured):
    class Two(Workers):
        count, rank = 2, 1

        def all_gather(self, value):
            return [self.of_worker_0 or value, value]

    cases, two = measured(Plan(16, 64)), Two()
    for two.of_worker_0, expected in ((None, DEFAULT), ([16, 0], Plan(16, 0))):  # worker 0 may resume a run
        assert highlevel.Replicas([mx.cpu()], Settings(256), two).own_config["tune"] == expected
    assert not cases and not cache.exists()


def test_another_processor_emulated_or_not_is_measured_again(cache, measured, monkeypatch):
    cases = measured(Plan(16, 64))
    chosen()
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    chosen()
    assert len(cases) == 2
    monkeypatch.delenv("DNNL_MAX_CPU_ISA")
    monkeypatch.setattr(plans, "machine", lambda: "a processor with another name")
    chosen()
    assert len(cases) == 3 == len(json.loads(cache.read_text()))


def test_a_network_with_the_same_name_and_other_layers_is_measured_again(cache, measured):
    cases = measured(Plan(1, 0))
    for channels in (4, 5):
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Conv2D(channels, 3))
        highlevel.initialize(net, [mx.cpu()])
        tuning.choose(net, "mine", mx.cpu(), 64, highlevel.forward_backward)
    assert len(cases) == 2


@pytest.mark.parametrize("batch_size, tune", [(256, (1, 32)), (4, [16, 0])])
def test_a_given_plan_is_used_without_a_measurement(cache, measured, batch_size, tune):
    cases = measured(Plan(16, 64))
    assert chosen(2, batch_size, tune=tune) == Plan(*tune)
    assert chosen(2, batch_size, tune=False) is False and chosen(2, batch_size, hybridize=False) is True
    assert not cases and not cache.exists()


@pytest.mark.parametrize("tune", ["fast", (16,), (8, 64), (16, -1), (16, 1.5), (True, 64)])
def test_an_invalid_plan_is_refused(tune):
    with pytest.raises(UsageError):
        chosen(tune=tune)


def test_the_fastest_plan_has_the_shortest_time_by_a_clear_margin():
    times = {DEFAULT: [1.0, 1.1, 1.1], Plan(16, 32): [9.0, 0.9, 9.0], Plan(1, 64): [0.95, 0.95, 0.95]}
    assert plans.fastest(times) == Plan(16, 32)
    assert plans.fastest({DEFAULT: [1.0, 2.0], Plan(16, 0): [0.99, 0.99]}) == DEFAULT
    assert plans.fastest({DEFAULT: [1.0], Plan(16, 0): [0.5], Plan(16, 64): [0.51]}) == Plan(16, 64)  # less memory


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', '{"a": {"b": [8, 64]}}', '{"a": {"b": "16"}}', b"\xff"])
def test_a_damaged_cache_is_refused_and_left_unchanged(cache, content):
    cache.parent.mkdir(parents=True)
    content = content if isinstance(content, bytes) else content.encode()
    cache.write_bytes(content)
    with pytest.raises(Error, match="tuning.json"):
        chosen()
    assert cache.read_bytes() == content


def test_without_a_writable_cache_the_default_is_used_and_one_line_says_so(cache, measured, capfd):
    measured(Plan(16, 64))
    cache.parent.parent.touch()  # a file where the folder should be
    assert chosen() == DEFAULT
    assert capfd.readouterr().err.count("\n") == 1


def test_another_process_that_measured_at_the_same_time_decides(cache, measured):
    assert plans.add("case", Plan(16, 64)) == plans.add("case", Plan(1, 0)) == Plan(16, 64)


def test_a_run_records_its_plan_and_is_resumed_with_it_even_if_the_cache_has_another(cache, measured, tmp_path):
    arguments = {"dataset": "synthetic", "limit": 512, "seed": 3, "device": "cpu"}
    measured(Plan(16, 32))
    highlevel.train(2, 256, 0.2, epochs=1, out=tmp_path, **arguments)
    cache.unlink()
    cases = measured(Plan(1, 0))
    for epochs in (2, 3):
        tune = records.options(tmp_path)["tune"]
        assert tune == [16, 32]
        highlevel.train(2, 256, 0.2, epochs=epochs, tune=tune, resume=tmp_path, **arguments)
    assert len(cases) == 1
