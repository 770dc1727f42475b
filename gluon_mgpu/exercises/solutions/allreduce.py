"""Exercise allreduce: average the arrays of all devices, in place.

PyTorch's DDP does not sum the gradients over the devices, but averages them. After the call, each device's array holds
the mean of all arrays. The arrays are gradients of the caller's parameters: write into them, and return nothing. Copy
an array to a device (copyto, as_in_context) before you use it there. CPU contexts share the same memory and can read
each other's arrays, but each GPU has its own memory. Only queue the work: asnumpy, wait_to_read and waitall make Python
wait.
"""


def allreduce(data):
    """Replace each array by the mean of all arrays. data: a list of arrays of the same shape, one per device."""
    mean = data[0]
    for array in data[1:]:
        mean[:] += array.as_in_context(mean.context)
    mean[:] /= len(data)
    for array in data[1:]:
        mean.copyto(array)
