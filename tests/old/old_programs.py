"""Programs for MXNet 1.x on GPUs. `gluon-mgpu run --gpus 4` runs this file."""

import pickle
import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon.utils import split_and_load

GPUS = [mx.gpu(i) for i in range(4)]


def test_gpu_i_is_cpu_context_i_plus_1():
    assert [*map(str, GPUS[:2])] == ["cpu(1)", "cpu(2)"] and mx.Context("gpu", 1) == mx.gpu(1) != mx.cpu(1)
    with mx.gpu(1):
        zero = nd.zeros(1)
    assert zero.context == GPUS[1] and zero.asscalar() == 0
    mx.gpu(1).empty_cache()
    assert pickle.loads(pickle.dumps(GPUS[1])) == GPUS[1]
    assert mx.kv.create("nccl").type == "device"


def test_every_query_about_gpus_has_the_number_that_the_user_gave_which_is_also_the_most():
    from mxnet.gluon.contrib.estimator.estimator import num_gpus
    from mxnet.test_utils import list_gpus

    answers = num_gpus(), mx.context.num_gpus(), mx.util.get_gpu_count(), mx.npx.num_gpus(), len(list_gpus())
    assert answers == (4, 4, 4, 4, 4)
    with pytest.raises(mx.MXNetError, match=r"gpu\(4\)"):
        mx.gpu(4)
    code = "import mxnet as mx; print(mx.gpu(3), mx.context.num_gpus())"
    assert subprocess.check_output([sys.executable, "-c", code], stderr=subprocess.DEVNULL) == b"cpu(4) 4\n"


def test_an_array_in_host_memory_does_not_change_with_its_copy_on_a_gpu():
    pinned = next(iter(gluon.data.DataLoader(nd.ones((4, 3)), 4, pin_memory=True)))
    for host in (nd.ones((4, 3)), pinned):
        for on_gpu in (host.as_in_context(GPUS[0]), *split_and_load(host, GPUS[:1])):
            assert host.context.device_type in ("cpu", "cpu_pinned") and on_gpu.context == GPUS[0]
            on_gpu += 1
            assert on_gpu.sum().asscalar() == 24 == 2 * host.sum().asscalar()
            on_host = on_gpu.as_in_context(mx.cpu())
            on_gpu += 1
            assert on_host.sum().asscalar() == 24


def test_fewer_examples_than_gpus_are_split_as_in_early_versions_of_mxnet():
    for n, sizes in ((2, [1, 1]), (5, [2, 1, 1, 1])):
        shards = split_and_load(nd.ones((n, 3)), GPUS, even_split=False)
        assert [(len(x), x.context) for x in shards] == list(zip(sizes, GPUS))
    with pytest.raises(ValueError):
        split_and_load(nd.ones((2, 3)), GPUS)


def test_names_of_early_versions_exist():
    assert mx.gluon.autograd.record and mx.optimizer.sgd_mom_update


def test_metrics_reset_as_in_early_versions_of_mxnet():
    class Tasks(mx.metric.EvalMetric):  # early versions called reset also for reset_local
        def reset(self):
            self.sum_metric = [0, 0]

    tasks = Tasks("tasks")
    tasks.sum_metric = [1, 2]
    tasks.reset_local()
    assert tasks.sum_metric == [0, 0]


@pytest.mark.parametrize("dilation, groups", [(1, 1), (2, 4)])  # MXNet itself fails with (1, 1)
def test_conv1d_before_batch_norm_trains_with_any_number_of_channels(dilation, groups):
    X, net = nd.random.normal(shape=(8, 16, 40)), gluon.nn.HybridSequential()
    convolution = gluon.nn.Conv1D(16, 3, 2, 1, dilation, groups, activation="relu", weight_initializer="normal")
    net.add(convolution, gluon.nn.BatchNorm(scale=False), gluon.nn.Conv1D(1, 1, use_bias=False))
    net.initialize()
    weight, bias = convolution.weight, convolution.bias
    for _ in range(2):
        with autograd.record():
            Y = net(X) ** 3
        Y.backward()
        assert np.isfinite(Y.asnumpy()).all() and np.abs(weight.grad().asnumpy()).max() > 0
        net.hybridize()
    kernel = {"kernel": (1, 3), "stride": (1, 2), "pad": (0, 1), "dilate": (1, dilation), "num_group": groups}
    two = nd.Convolution(X.expand_dims(2), weight.data().expand_dims(2), bias.data(), num_filter=16, **kernel)
    assert nd.abs(convolution(X) - nd.relu(two).squeeze(2)).max().asscalar() < 1e-5


def test_an_error_of_mxnet_on_cpus_ends_with_what_to_do():
    with pytest.raises(mx.MXNetError) as half:
        nd.Convolution(
            *(nd.ones((1, 1, 2, 2), dtype="float16"),) * 2, kernel=(2, 2), num_filter=1, no_bias=True
        ).asnumpy()
    x, weight = nd.ones((8, 16, 40)), nd.ones((16, 16, 3))
    x.attach_grad()
    with autograd.record():
        y = nd.Convolution(x, weight, kernel=(3,), num_filter=16, no_bias=True)
        z = nd.BatchNorm(y, *[nd.ones(16) for _ in range(4)])
    z.backward()
    with pytest.raises(mx.MXNetError) as one_dimensional:
        nd.waitall()
    transposed = {"kernel": (5, 5), "stride": (2, 2), "target_shape": (14, 14), "num_filter": 4}
    with pytest.raises(mx.MXNetError) as with_shape:
        nd.Deconvolution(nd.ones((1, 8, 7, 7)), nd.ones((8, 4, 5, 5)), **transposed).asnumpy()
    without = "MXNET_MKLDNN_ENABLED=0"
    for error, advice in ((half, "use float32"), (one_dimensional, without), (with_shape, without)):
        assert advice in str(error.value).splitlines()[-1]


def test_sync_batch_norm_on_two_gpus_is_batch_norm_on_one():
    X = nd.random.normal(shape=(4, 3, 6, 6))

    def gradients(layer, ctx):
        net = gluon.nn.Sequential()
        for _ in range(20):  # so many hang with MXNet's default number of temporary spaces
            net.add(gluon.nn.Conv2D(3, 3, padding=1), layer())
        net.initialize(mx.init.One(), ctx=ctx)
        shards = split_and_load(X, ctx)
        for x in shards:
            x.attach_grad()
        with autograd.record():
            losses = [(net(x) ** 3).sum() for x in shards]
        autograd.backward(losses)
        return np.concatenate([x.grad.asnumpy() for x in shards])

    sync = gradients(lambda: gluon.contrib.nn.SyncBatchNorm(num_devices=2), GPUS[:2])
    np.testing.assert_allclose(sync, gradients(gluon.nn.BatchNorm, GPUS[:1]), atol=1e-3 * np.abs(sync).max())


if __name__ == "__main__":
    sys.exit(pytest.main(["-qsc", "/dev/null", "--noconftest", "-p", "no:cacheprovider", __file__]))
