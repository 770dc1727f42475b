"""Exercise warmup: reach a large learning rate in small steps.

A learning rate that is scaled to k devices can be too large at the start of the training, when gradients are large and
change quickly. So begin with the rate of one device. Increase it by the same amount in each step, until it has k times
this value at step warmup_steps. Then keep it.
"""


def learning_rate(step: int, lr: float, devices: int, warmup_steps: int) -> float:
    """The learning rate of a step: lr at step 0, and lr * devices from warmup_steps on, which may be 0."""
    if step >= warmup_steps:
        return lr * devices
    return lr * (1 + (devices - 1) * step / warmup_steps)
