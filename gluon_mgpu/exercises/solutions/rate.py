"""Exercise rate: choose the learning rate for a larger batch.

This is an exercise of the notebook: on two devices, the batch can be twice as large in the same time. Which learning
rate does it need? The gradient is a mean over the batch, so a larger batch makes it less noisy but not larger. But an
epoch has fewer steps. Choose the rate with which one epoch gets as far as before, as long as steps are small. The check
trains a small network with it.
"""


def learning_rate(lr, batch_size, new_batch_size):
    """The learning rate for new_batch_size, if lr is good for batch_size."""
    return lr * new_batch_size / batch_size
