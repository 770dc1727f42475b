"""What several tests of conversions need."""

import importlib.util
import json

import numpy as np
import pytest
from forks import forked
from mxnet import nd

from gluon_mgpu import convert
from gluon_mgpu.convert import to_pytorch


def needs(to):
    packages = convert.TARGETS[to].PACKAGES
    return pytest.mark.skipif(
        not all(map(importlib.util.find_spec, packages)), reason=f"waits for pip install {' '.join(packages)}"
    )


TARGETS = GLUON, PYTORCH, ONNX = [pytest.param(to, marks=needs(to)) for to in convert.TARGETS]


def files(folder, symbol, attrs=None, **shapes):
    """The files of a network with random parameters. shapes: of its inputs. attrs: {operator: more attributes}"""
    shapes = shapes or {"data": (2, 6)}
    sizes, _, running = symbol.infer_shape(**shapes)
    random = np.random.default_rng(0)
    arrays = {f"arg:{k}": random.normal(0, 0.3, v) for k, v in zip(symbol.list_arguments(), sizes) if k not in shapes}
    arrays |= {f"aux:{k}": random.uniform(0.5, 1, v) for k, v in zip(symbol.list_auxiliary_states(), running)}
    nd.save(str(folder / "n-0000.params"), {name: nd.array(array) for name, array in arrays.items()})
    graph = json.loads(symbol.tojson())
    for node in graph["nodes"]:
        node.setdefault("attrs", {}).update((attrs or {}).get(node["op"], {}))
    (folder / "n-symbol.json").write_text(json.dumps(graph))
    return folder / "n-symbol.json", folder / "n-0000.params"


def in_forks(pytorch):
    """In this block, conversions load the written files in forks, not in new processes."""
    return forked(to_pytorch, pytorch)
