"""Rehearses training on GPUs on a machine without GPUs: contexts that claim to be GPUs compute on the CPU.

So these tests run the code that `device="gpu"` selects. A real GPU has never been tried.
"""

import json

import pytest
from own_process import python

TRAIN = """
    import json, sys
    import gluon_mgpu
    gluon_mgpu.configure(2)
    import mxnet as mx
    from gluon_mgpu import implementations
    from gluon_mgpu.legacy import contexts
    from gluon_mgpu.runtime import devices

    device, options = sys.argv[2], json.loads(sys.argv[3])
    stores, create_store = [], mx.kv.create
    mx.kvstore.create = mx.kv.create = lambda name="local": stores.append(name) or create_store(name)
    if device == "gpu":
        contexts.replace(mx, gpus=2, map_gpus=True)
        create, real = mx.Context.__init__, mx.Context.device_type
        def named(context, device_type, device_id=0):
            create(context, device_type, device_id)
            context.named = device_type
        mx.Context.__init__ = named
        mx.Context.device_type = property(lambda context: getattr(context, "named", None) or real.fget(context))
        mx.Context.__str__ = lambda context: f"{real.fget(context)}({context.device_id})"  # MXNet's library reads it
        devices.driver_gpus = lambda: [("a GPU", 7, 0)] * 2
    data = {"dataset": "synthetic", "limit": 512, "epochs": 2, "seed": 1}
    epochs = implementations.train(sys.argv[1], 2, 64, 0.2, device=device, **data, **options)
    print(json.dumps({"losses": [epoch.train_loss for epoch in epochs], "stores": stores}))
"""


def trained(lesson, device, **options):
    done = python(TRAIN, lesson, device, json.dumps(options))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("lesson, plain", [("scratch", {}), ("highlevel", {"tune": False})])
def test_training_on_gpus_is_training_without_tuning(lesson, plain):
    on_gpus, notices = trained(lesson, "gpu")
    on_cpu, _ = trained(lesson, "cpu", **plain)
    assert on_gpus["losses"] == on_cpu["losses"]
    assert "CPU context" not in notices.replace("mx.gpu(i) is CPU context i", "")
    assert on_gpus["stores"] == ([] if lesson == "scratch" else ["device"])
