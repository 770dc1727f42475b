"""Exercise allreduce: sum the arrays of all devices, in place.

After the call, each device's array holds the sum of all arrays. The arrays are gradients of the caller's parameters:
write into them, and return nothing. Copy an array to a device (copyto, as_in_context) before you use it there. CPU
contexts share the same memory and can read each other's arrays, but each GPU has its own memory. Only queue the work:
asnumpy, wait_to_read and waitall make Python wait.
"""


def allreduce(data):
    """Sum arrays in place. data: a list of arrays of the same shape, one per device."""
    total = data[0]
    for array in data[1:]:
        total[:] += array.as_in_context(total.context)
    for array in data[1:]:
        total.copyto(array)
