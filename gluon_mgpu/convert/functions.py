"""PyTorch code of operators that need several lines. to_pytorch.py copies the functions that a network uses."""

import torch
from torch import nn
from torch.nn import functional as F


def scale_gradient(x, scale):
    """x, with its gradient multiplied by scale."""
    return x.detach() + scale * (x - x.detach())


def softmax_of_lengths(x, lengths, dim):
    """Softmax of the first elements along an axis; the others become 0."""
    positions = torch.arange(x.shape[dim], device=x.device)
    outside = (positions >= lengths.unsqueeze(-1)).transpose(-1, dim)
    return F.softmax(x.masked_fill(outside, torch.finfo(x.dtype).min), dim).masked_fill(outside, 0)


def sequence_mask(x, lengths, dim, value):
    """Replace what is beyond the end of each sequence. dim: the axis of time, 0 or 1; the other one is the batch."""
    positions = torch.arange(x.shape[dim], device=x.device)
    outside = positions.unsqueeze(1 - dim) >= lengths.unsqueeze(dim)
    return x.masked_fill(outside.reshape(outside.shape + (1,) * (x.dim() - 2)), value)


def sequence_last(x, lengths, dim):
    """The last element of each sequence. dim: the axis of time, 0 or 1; the other one is the batch."""
    last, batch = lengths.long() - 1, torch.arange(x.shape[1 - dim], device=x.device)
    return x[last, batch] if dim == 0 else x[batch, last]


def sequence_reverse(x, lengths):
    """Reverse each sequence up to its length. x: (time, batch, ...)."""
    time, batch = (torch.arange(size, device=x.device) for size in x.shape[:2])
    time, lengths = time.unsqueeze(1), lengths.long()
    return x[torch.where(time < lengths, lengths - 1 - time, time), batch]


def rnn_of_lengths(layer, x, lengths, states=None):
    """Apply a recurrent layer to the first elements of each sequence. Its output is 0 after them."""
    time = x.shape[1 if layer.batch_first else 0]
    x = nn.utils.rnn.pack_padded_sequence(x, lengths.long().cpu(), layer.batch_first, enforce_sorted=False)
    y, states = layer(x, states)
    return nn.utils.rnn.pad_packed_sequence(y, layer.batch_first, total_length=time)[0], states


def head(x, heads, i, parts):
    """Part i of the heads of (time, batch, heads * parts * size), as (batch * heads, time, size)."""
    x = x.reshape(x.shape[0], x.shape[1], heads, parts, -1)[:, :, :, i]
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def attention_values(x, attention, heads, parts):
    """The values, which are the last part of x, weighted by attention: (time, batch, heads * size)."""
    y = attention @ head(x, heads, parts - 1, parts)
    return y.reshape(-1, heads, *y.shape[1:]).permute(2, 0, 1, 3).flatten(2)


def affine_grid(theta, height, width):
    """Points (n, height, width, 2) of the output in the input."""
    y, x = (torch.linspace(-1, 1, size, device=theta.device) for size in (height, width))
    points = torch.stack([x.repeat(height), y.repeat_interleave(width), torch.ones_like(x.repeat(height))])
    return (theta.reshape(-1, 2, 3) @ points).transpose(1, 2).reshape(-1, height, width, 2)


def warp_grid(flow):
    """Points (n, 2, height, width) of an image that is moved by a flow of pixels."""
    height, width = flow.shape[2:]
    x, y = (torch.arange(size, device=flow.device) for size in (width, height))
    x, y = (flow[:, 0] + x) * 2 / (width - 1) - 1, (flow[:, 1] + y.unsqueeze(1)) * 2 / (height - 1) - 1
    return torch.stack([x, y], 1)


def correlation(x, y, kernel, displacement, stride, step, padding, multiply):
    """Mean products, or differences, of patches of x and patches of y that are shifted: one channel for each shift."""
    x, y = (F.pad(image, (padding,) * 4) for image in (x, y))
    height, width = (size - 2 * displacement for size in x.shape[2:])
    x, results = x[:, :, displacement : displacement + height, displacement : displacement + width], []
    shifts = [displacement + k * step for k in range(-(displacement // step), displacement // step + 1)]
    for top in shifts:
        for left in shifts:
            other = y[:, :, top : top + height, left : left + width]
            results.append((x * other if multiply else (x - other).abs()).mean(1))
    return F.avg_pool2d(torch.stack(results, 1), kernel, stride)


@torch.no_grad()  # as in MXNet
def box_decode(x, anchors, scales, largest, corners):
    """Boxes (x1, y1, x2, y2) from their differences to anchors, which are corners, or a center and a size."""
    center, size = anchors.split(2, -1)
    if corners:
        size = size - center
        center = center + size / 2
    shift, growth = (x * torch.tensor(scales, device=x.device)).split(2, -1)
    center, half = shift * size + center, growth.clamp(max=largest).exp() * size / 2
    return torch.cat([center - half, center + half], -1)


def deformable_convolution(x, offset, mask, weight, bias, stride, padding, dilation, groups, offset_groups):
    """A convolution whose kernel takes pixels at other places. offset: (n, offset_groups * kernel * (y, x), h, w)."""
    n, (kernel, size) = x.shape[0], (weight.shape[2:], offset.shape[2:])
    offset = offset.reshape(n * offset_groups, *kernel, 2, *size)
    places = []
    for axis in (0, 1):
        first = torch.arange(size[axis], device=x.device) * stride[axis] - padding[axis]
        at = first + torch.arange(kernel[axis], device=x.device).unsqueeze(1) * dilation[axis]  # (kernel, size)
        at = at.reshape((-1, 1, size[0], 1) if axis == 0 else (1, kernel[1], 1, size[1]))
        places.append((offset[:, :, :, axis] + at).flatten(1, 3))
    (y, x_), (height, width) = places, x.shape[2:]
    grid = torch.stack([2 * x_ / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
    mode = "border" if mask is None else "zeros"
    if mask is None:  # beyond the centers of the last pixels, their values go on for one pixel
        mask = ((y >= 0) & (x_ >= 0) & (y < height) & (x_ < width)).to(x.dtype)
    images, mask = x.reshape(n * offset_groups, -1, height, width), mask.reshape(y.shape[0], 1, *y.shape[1:])
    values = F.grid_sample(images, grid, padding_mode=mode, align_corners=True) * mask
    columns = values.reshape(n, groups, -1, size[0] * size[1])
    y = (weight.reshape(groups, -1, columns.shape[2]) @ columns).reshape(n, -1, *size)
    return y if bias is None else y + bias.reshape(-1, 1, 1)
