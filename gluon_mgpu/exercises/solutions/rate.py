"""Exercise rate: choose the learning rate for a larger batch.

This is an exercise from the notebook: on two devices, a batch can be twice as large and still take the same time. Which
learning rate does the larger batch need? The gradient is a mean over the batch, so a larger batch makes the gradient
less noisy, but not larger. An epoch also has fewer steps. Choose the rate so that an epoch reduces the loss by the same
amount as before. The check trains a small network with this rate.
"""


def learning_rate(lr, batch_size, new_batch_size):
    """The learning rate for new_batch_size, if lr works well for batch_size."""
    return lr * new_batch_size / batch_size
