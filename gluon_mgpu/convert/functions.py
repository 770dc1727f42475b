"""PyTorch code of operators that need several lines. pytorch.py copies the functions that a network uses."""

import torch
from torch.nn import functional as F


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
