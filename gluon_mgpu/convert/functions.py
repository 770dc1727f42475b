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


def overlapping(boxes, threshold):
    """Whether each two boxes overlap by more than the threshold. boxes: (n, k, 4), with their corners."""
    a, b = boxes.unsqueeze(2), boxes.unsqueeze(1)
    both = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)
    either = area.unsqueeze(2) + area.unsqueeze(1) - both
    return torch.where(either > 0, both / either, 0) > threshold


@torch.jit.script
def without_overlaps(valid, overlaps):
    """Drop each box that overlaps a box which comes before it and is kept. valid: (n, k); overlaps: (n, k, k)."""
    overlaps = overlaps.triu(1) & valid.unsqueeze(1)
    keep, changed = valid, True
    while changed:
        before = keep
        keep = valid & ~(overlaps & before.unsqueeze(2)).any(1)
        changed = bool((keep != before).any())
    return keep


def in_order(x, key):
    """Sort the rows of (n, k, ...) by a key (n, k), the largest first."""
    order = key.argsort(1, descending=True)
    return x.gather(1, order.unsqueeze(-1).expand(x.shape))


def at_front(x, keep):
    """Move the rows of (n, k, ...) to keep (n, k) before the others, and fill the others with -1."""
    places = torch.arange(x.shape[1], device=x.device)
    return in_order(x.masked_fill(~keep.unsqueeze(-1), -1), x.shape[1] * keep - places)


def box_nms(x, threshold, lowest, topk, coord, score, label, background, across_labels, center):
    """Drop boxes that overlap a box with a higher score. x: (..., boxes, numbers), which become -1 at the end."""
    rows = x.reshape(-1, x.shape[-2], x.shape[-1])
    invalid = rows[..., score] <= lowest
    if label >= 0 and background >= 0:
        invalid = invalid | (rows[..., label] == background)
    key = rows[..., score].masked_fill(invalid, float("-inf"))
    rows, valid = in_order(rows, key), in_order((~invalid).float().unsqueeze(-1), key)[..., 0] > 0
    if topk > 0:
        rows, valid = rows[:, :topk], valid[:, :topk]
    boxes = rows[..., coord : coord + 4]
    if center:
        boxes = torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)
    overlaps = overlapping(boxes, threshold)
    if label >= 0 and not across_labels:
        overlaps = overlaps & (rows[..., label].unsqueeze(1) == rows[..., label].unsqueeze(2))
    keep = without_overlaps(valid, overlaps)
    rows = at_front(rows, keep)
    return F.pad(rows, (0, 0, 0, x.shape[-2] - rows.shape[1]), value=-1).reshape(x.shape)


def multi_box_detection(scores, offsets, anchors, variances, clip, lowest, threshold, across_labels, topk):
    """Labels, scores and corners (n, boxes, 6) of boxes; the labels of overlapping boxes are -1."""
    score, label = scores[:, 1:].max(1)
    centers, sizes = (anchors[..., :2] + anchors[..., 2:]) / 2, anchors[..., 2:] - anchors[..., :2]
    offsets = offsets.reshape(offsets.shape[0], -1, 4) * torch.tensor(variances, device=offsets.device)
    centers, halves = offsets[..., :2] * sizes + centers, offsets[..., 2:].exp() * sizes / 2
    boxes = torch.cat([centers - halves, centers + halves], -1)
    boxes = boxes.clamp(0, 1) if clip else boxes
    rows = torch.cat([label.float().unsqueeze(-1), score.unsqueeze(-1), boxes], -1)
    rows = at_front(rows, score >= lowest)
    best = in_order(rows, rows[..., 1])
    best, others = (best, rows[:, :0]) if topk < 0 else (best[:, :topk], rows[:, topk:])
    overlaps = overlapping(best[..., 2:], threshold)
    if not across_labels:
        overlaps = overlaps & (best[..., 0].unsqueeze(1) == best[..., 0].unsqueeze(2))
    keep = without_overlaps(best[..., 0] >= 0, overlaps)
    labels = torch.cat([best[..., 0].masked_fill(~keep, -1), torch.full_like(others[..., 0], -1)], 1)
    return torch.cat([labels.unsqueeze(-1), torch.cat([best, others], 1)[..., 1:]], -1)
