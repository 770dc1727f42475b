import signal

import gluon_mgpu

OF_THEIR_OWN_TARGETS = ("faults", "network", "cuda_wheels", "notebooks")  # markers: run only where -m names them

gluon_mgpu.configure(contexts=5)  # before any test module imports mxnet

# Ignored where the suite is started in the background of a script, and then by all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    left_out = [
        item
        for item in items
        if any(mark in item.keywords and mark not in config.option.markexpr for mark in OF_THEIR_OWN_TARGETS)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
