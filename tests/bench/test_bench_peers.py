"""PyTorch's networks compute the same as Gluon's, and all subjects train to the same loss.

mxnet is imported here, so torch is not: it runs in separate processes. Tests that need torch are skipped if it is
missing.
"""

import importlib.util
import sys

import numpy as np
import pytest
from bench import harness
from mxnet import nd
from runs import finished, program

from gluon_mgpu import highlevel
from gluon_mgpu.training import datasets

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="make bench-peers installs PyTorch")


def step_in_float64(model):
    """Images, labels, losses; the trained parameters; their gradients, which are sums over the examples."""
    made, rng = harness.replicas("highlevel", model, 1, tune=False), np.random.default_rng(0)
    state = made.state_dict()
    for name, p in state.items():
        if p.ndim == 1 and "running" not in name:
            state[name] = p + 0.1 * rng.standard_normal(p.shape, np.float32)
    made.load_state_dict(state)
    made.net.cast("float64")
    images, labels = datasets.synthetic(4, 1, seed=3)[1:3]
    X, y = nd.array(images / 255, dtype="float64"), nd.array(labels, dtype="float64")
    [losses] = highlevel.forward_backward(made.net, [X], [y])
    params = [p for p in made.net.collect_params().values() if p.grad_req != "null"]
    return [X, y, losses], [p.data() for p in params], [p.grad() for p in params]


PYTORCHS = """
    import sys
    import numpy as np
    import torch
    from bench import torch_peers
    assert "mxnet" not in sys.modules
    model, file = sys.argv[1:]
    X, y, losses, *arrays = np.load(file).values()
    params, gradients = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    net = torch_peers.network(model).double()
    torch_peers.load(net, dict(enumerate(params)))
    found = torch.nn.functional.cross_entropy(net(torch.from_numpy(X)), torch.from_numpy(y).long(), reduction="none")
    found.sum().backward()
    found_gradients = [p.grad.numpy() for p in net.parameters()]
    assert [g.shape for g in gradients] == [g.shape for g in found_gradients]
    whole = np.sqrt(sum((g**2).sum() for g in found_gradients))
    print(float(np.abs(losses - found.detach().numpy()).max()))
    print(max(float(np.linalg.norm(a - b) / whole) for a, b in zip(gradients, found_gradients)))
"""


@needs_torch
@pytest.mark.parametrize("model", ("lenet", "resnet18"))
def test_pytorchs_network_has_our_loss_and_our_gradients(model, tmp_path):
    ours = [array.asnumpy() for arrays in step_in_float64(model) for array in arrays]
    np.savez(tmp_path / "ours.npz", *ours)
    words = [sys.executable, "-c", program(PYTORCHS), model, tmp_path / "ours.npz"]
    done = finished(*words, env=harness.environment())
    assert done.returncode == 0, done.stderr
    assert max(map(float, done.stdout.split())) < 1e-12
