"""Steps for `check.parallel`, right ones and wrong ones. `python steps.py CASE` prints what the check finds."""

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from gluon_mgpu import check


def batch(i, n):
    return {"x": torch.rand(n, 20), "y": torch.randint(5, (n,))}


def mlp(normalize=nn.Identity):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 16), normalize(), nn.Tanh(), nn.Linear(16, 5))


def sgd(net, lr=0.1):
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


def zero(net):
    return ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)


def bare(net):
    return net


def sharded(net):
    for layer in (net[0], net[3], net):
        fully_shard(layer)
    return net


def sharded_without_mean(net):
    sharded(net)
    for layer in (net[0], net[3], net):
        layer.set_gradient_divide_factor(1.0)
    return net


def made(wrap, optimizer=sgd, layer=nn.Identity):
    def make(rank, world):
        net = wrap(mlp(layer))
        return net, optimizer(net)

    return make


ddp = made(DDP)
alone = made(bare)


def loss_of(net, part):
    return F.cross_entropy(net(part["x"]), part["y"])


def plain(state, part, factor=1):
    net, trainer, *others = state
    trainer.zero_grad()
    loss = loss_of(net, part) * factor
    loss.backward()
    trainer.step()
    for other in others:
        other.step()
    return loss


def in_half_precision(state, part):
    net, trainer = state
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(net, part)
    loss.backward()
    trainer.step()
    trainer.zero_grad()


def accumulated(first, last):
    def step(state, part):
        net, trainer = state
        halves = [{name: a.chunk(2)[i] for name, a in part.items()} for i in range(2)]
        for half, synchronized in zip(halves, (first, last)):
            with nullcontext() if synchronized else getattr(net, "no_sync", nullcontext)():
                (loss_of(net, half) * len(half["x"]) / len(part["x"])).backward()
        trainer.step()
        trainer.zero_grad()

    return step


def loaded(rank=None):
    def step(state, whole):
        data = TensorDataset(whole["x"], whole["y"])
        sampler = DistributedSampler(data, rank=rank, shuffle=False)
        for x, y in DataLoader(data, len(data), sampler=sampler):
            plain(state, {"x": x, "y": y})

    return step


def scaled(state, part):
    net, trainer, scaler = state
    scaler.scale(loss_of(net, part)).backward()
    scaler.unscale_(trainer)
    nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
    nn.utils.clip_grad_value_(parameters=net.parameters(), clip_value=0.05)
    scaler.step(trainer)
    scaler.update()
    trainer.zero_grad()


def with_scaler(make):
    return lambda rank, world: (*make(rank, world), torch.amp.GradScaler("cpu"))


def sum_hook(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def hooked(hook):
    def make(rank, world):
        net, trainer = ddp(rank, world)
        net.register_comm_hook(None, hook)
        return net, trainer

    return make


def clipping_hooks(rank, world):
    net, trainer = ddp(rank, world)
    for p in net.parameters():
        p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return net, trainer


def with_average(rank, world):
    net, trainer = ddp(rank, world)
    return net, trainer, AveragedModel(net.module, multi_avg_fn=None)


def averaged(everywhere):
    def step(state, part):
        net, trainer, average = state
        plain((net, trainer), part)
        if everywhere or dist.get_rank() == 0:
            average.update_parameters(net.module)

    return step


def with_schedule(times):
    def make(rank, world):
        net, trainer = ddp(rank, world)
        schedule = torch.optim.lr_scheduler.ExponentialLR(trainer, 0.5)
        return (net, trainer, *[schedule] * (world if times else 1))

    return make


normalized = made(DDP, adam, lambda: nn.BatchNorm1d(16))


def by_hand(state, part, factor=1):
    """A step for processes only, such as those of tensor parallelism. factor: of the loss of process 1."""
    net, trainer = state
    (loss_of(net, part) * factor ** dist.get_rank() * len(part["x"]) / 12).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    trainer.step()
    trainer.zero_grad()


def noisy(state, part):
    return plain(state, {**part, "x": part["x"] + 0.1 * torch.randn_like(part["x"])})


def with_own_generator(state, part):
    noise = torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    return plain(state, {**part, "x": part["x"] + 0.1 * noise})


def with_piece(rank, world):
    net, trainer = ddp(rank, world)
    return net, trainer, {"moments": torch.cat([p.detach().ravel() for p in net.parameters()]).chunk(world)[rank]}


class Views(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor
    words: list


@dataclass
class Trainer:
    net: nn.Module
    trainer: torch.optim.Optimizer
    seen: int = 0

    def fit(self, part):
        self.seen += len(part["x"])
        return plain((self.net, self.trainer), part)


def in_a_closure(rank, world):
    state = ddp(rank, world)
    return lambda part: plain(state, part)


def two_views(state, part):
    net, trainer = state
    assert isinstance(part, Views) and len(part.words) == len(part.first)
    first, second = net(torch.cat([part.first, part.second])).chunk(2)
    trainer.zero_grad()
    (first - second).square().mean().backward()
    trainer.step()


def views(i, n):
    return Views(torch.randn(n, 20), torch.randn(n, 20), ["word"] * n)


def scaled_in_half_precision(state, part):
    net, trainer, scaler = state
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(net, part)
    scaler.scale(loss).backward()
    scaler.step(trainer)
    scaler.update()
    trainer.zero_grad()


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(11, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=20)


def spectral(rank, world):
    net = DDP(nn.Sequential(Spectrum(), mlp()))
    return net, sgd(net)


def over_calls(n, synchronized):
    def step(state, part):
        net, trainer, counter = state
        counter["calls"] += 1
        last = counter["calls"] % n == 0
        with nullcontext() if last and synchronized else net.no_sync():
            (loss_of(net, part) / n).backward()
        if last:
            trainer.step()
            trainer.zero_grad()

    return step


def never_zeroed(state, part):
    """Updates in every second call."""
    net, trainer, counter = state
    loss_of(net, part).backward()
    counter["calls"] += 1
    if counter["calls"] % 2 == 0:
        trainer.step()


def gathering(state, part):
    loss, rank = plain(state, part).detach(), dist.get_rank()
    work = dist.gather(loss, [loss.clone() for _ in range(dist.get_world_size())] if rank == 0 else None, async_op=True)
    work.is_completed()


def ring(waits):
    def step(state, part):
        loss, rank, world = plain(state, part).detach(), dist.get_rank(), dist.get_world_size()
        if world > 1:
            left, right = (rank - 1) % world, (rank + 1) % world
            ops = [dist.P2POp(dist.isend, loss, right), dist.P2POp(dist.irecv, torch.zeros(()), left)]
            for work in dist.batch_isend_irecv(ops):
                if waits:
                    work.wait()

    return step


def polling(state, part):
    net, trainer = state
    trainer.zero_grad()
    loss_of(net, part).backward()
    for p in net.parameters():
        p.grad /= dist.get_world_size()
        work = dist.all_reduce(p.grad, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
    trainer.step()


def counting(rank, world):
    return *ddp(rank, world), {"calls": 0}


def summed(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def limited(limit):
    def step(state, part):
        net, trainer = state
        trainer.zero_grad()
        loss_of(net, part).backward()
        limit(net)
        summed(net)
        trainer.step()

    return step


def skipping(state, part):
    net, trainer = state
    trainer.zero_grad()
    loss = loss_of(net, part)
    loss.backward()
    summed(net)
    if torch.isfinite(loss):
        trainer.step()


def logging(state, part):
    loss = plain(state, part)
    if loss > 1e6:
        print("large")
    return loss


def weighted(state, part):
    net, trainer = state
    trainer.zero_grad()
    losses, weights = F.cross_entropy(net(part["x"]), part["y"], reduction="none"), part["x"][:, 0]
    ((losses * weights).sum() / weights.sum()).backward()
    trainer.step()


def warmed_up(rank, world):
    net = mlp()
    trainer = sgd(net)
    return net, trainer, torch.optim.lr_scheduler.LambdaLR(trainer, lambda step: min(step / 2, 1))


def two_losses(rank, world):
    torch.manual_seed(3)
    critic, actor = nn.Linear(20, 1), mlp()
    return critic, actor, torch.optim.SGD([*critic.parameters(), *actor.parameters()], lr=0.1)


def critic_not_summed(state, part):
    critic, actor, trainer = state
    critic(part["x"]).square().mean().backward()
    trainer.step()
    trainer.zero_grad(set_to_none=False)
    loss_of(actor, part).backward()
    summed(actor)
    trainer.step()
    trainer.zero_grad(set_to_none=False)


class Center(nn.Module):
    def __init__(self):
        super().__init__()
        self.running = torch.zeros(16)

    def forward(self, x):
        self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
        return x


class Largest(nn.Module):
    """Only one process has its own largest input."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.largest = rank, torch.zeros(())

    def forward(self, x):
        if dist.get_rank() == self.rank:
            self.largest = torch.maximum(self.largest, x.detach().max())
        return x


class Momentum:
    """Each process has a moment of its own gradients; the sum of these is that of one process."""

    def __init__(self, net):
        self.params = list(net.parameters())
        self.moments = [torch.zeros_like(p) for p in self.params]

    def update(self):
        for p, moment in zip(self.params, self.moments):
            moment.mul_(0.9).add_(p.grad)
            total = moment.clone()
            dist.all_reduce(total)
            p.data -= 0.1 * total / dist.get_world_size()
            p.grad = None


def with_moments(rank, world):
    net = mlp()
    return net, Momentum(net)


def sum_of_moments(state, part):
    net, momentum = state
    loss_of(net, part).backward()
    momentum.update()


def with_residues(rank, world):
    net = mlp()
    return net, [torch.zeros_like(p) for p in net.parameters()]


def compensated(state, part):
    """Kahan's sum: what rounding takes from an update is added to the next one."""
    net, residues = state
    loss_of(net, part).backward()
    summed(net)
    with torch.no_grad():
        for p, residue in zip(net.parameters(), residues):
            update, old = residue - 0.1 * p.grad, p.clone()
            p += update
            residue.copy_(update - (p - old))
            p.grad = None


def with_mean(rank, world):
    return *ddp(rank, world), {"mean": torch.zeros(20)}


def sum_of_means(state, part):
    *own, kept = state
    plain(own, part)
    mean = part["x"].mean(0)
    dist.all_reduce(mean)
    kept["mean"].copy_(mean)


def with_params(rank, world):
    net = mlp()
    return net, {name: p.detach().clone() for name, p in net.named_parameters()}


def functional(state, part):
    net, params = state
    grads = torch.func.grad(lambda params: loss_of(lambda x: torch.func.functional_call(net, params, x), part))(params)
    for name, grad in grads.items():
        dist.all_reduce(grad)
        params[name] -= 0.1 / dist.get_world_size() * grad


class Lion(torch.optim.Optimizer):
    """Sums gradients, but not those of which its moment is made."""

    def __init__(self, net):
        super().__init__(net.parameters(), {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            total = p.grad.clone()
            dist.all_reduce(total)
            p -= 0.01 * torch.tanh(20 * (0.9 * moment + 0.1 * total / dist.get_world_size()))
            moment.mul_(0.99).add_(p.grad, alpha=0.01)


def zeroed_by_others(state, part):
    """Process 0 adds to the gradients of the step before."""
    net, trainer = state
    if dist.get_rank() > 0:
        trainer.zero_grad()
    loss_of(net, part).backward()
    trainer.step()


class Queue(nn.Module):
    """Keeps the mean of the latest inputs of each process."""

    def __init__(self):
        super().__init__()
        self.register_buffer("latest", torch.ones(16))

    def forward(self, x):
        result = x + self.latest.clone()
        self.latest.copy_(x.detach().mean(0))
        return result


def first_half_only(state, part):
    net, trainer = state
    for i in range(2):
        net.set_requires_gradient_sync(i == 0)
        half = {name: a.chunk(2)[i] for name, a in part.items()}
        (loss_of(net, half) / 2).backward()
    trainer.step()
    trainer.zero_grad()


def frozen_on_one(state, part):
    net, trainer = state
    net[0].requires_grad_(dist.get_world_size() > 1)
    trainer.zero_grad()
    loss_of(net, part).backward()
    if dist.get_world_size() > 1:
        summed(net)
    trainer.step()


class Decaying(torch.optim.SGD):
    """The weight decay of each process is summed."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad / dist.get_world_size() + 0.1 * p.detach()
            dist.all_reduce(p.grad)
        super().step()


def climbing(state, part):
    """Sharpness-aware minimization that climbs the gradient of the process."""
    net, trainer = state
    with net.no_sync():
        loss_of(net, part).backward()
    moves = {p: p.grad.clone() for p in net.parameters()}
    trainer.zero_grad()
    with torch.no_grad():
        for p, move in moves.items():
            p += move
    loss_of(net, part).backward()
    with torch.no_grad():
        for p, move in moves.items():
            p -= move
    trainer.step()
    trainer.zero_grad()


def two_networks(rank, world):
    other = mlp(lambda: nn.BatchNorm1d(16))
    return *ddp(rank, world), other, sgd(other)


def both(state, part):
    net, trainer, other, its = state
    plain((net, trainer), part)
    loss_of(other, part).backward()
    summed(other)
    its.step()
    its.zero_grad()


EVEN = {"even": True}  # DDP's mean is that of the batch only if all parts are equally large
WHOLE = {"even": True, "divide": "none"}
# {case: (make, step, options)}
RIGHT = {
    "DDP": (ddp, plain, EVEN),
    "dropout": (made(DDP, layer=nn.Dropout), plain, EVEN),
    "DataLoader": (ddp, loaded(), WHOLE),
    "no_sync": (ddp, accumulated(False, True), EVEN),
    "scaler": (with_scaler(ddp), scaled, EVEN),
    "autocast": (ddp, in_half_precision, EVEN),
    "fully_shard": (made(sharded, adam), plain, EVEN),
    "fully_shard, a sum": (
        made(sharded_without_mean),
        lambda state, part: plain(state, part, factor=len(part["x"]) / 12),
        EVEN,
    ),
    "ZeRO": (made(DDP, zero), plain, EVEN),
    "comm hook": (hooked(fp16_compress_hook), plain, EVEN),
    "EMA": (with_average, averaged(True), EVEN),
    "schedule": (with_schedule(False), plain, EVEN),
    "batch normalization": (normalized, plain, EVEN),
    "own generator": (ddp, with_own_generator, EVEN),
    "strided": (ddp, plain, {**EVEN, "divide": "strided"}),
    "compile": (made(lambda net: torch.compile(DDP(net))), plain, EVEN),
    "reference": (alone, by_hand, {**EVEN, "reference": plain}),
    "a moment in pieces": (with_piece, lambda state, part: plain(state[:2], part), EVEN),
    "a dataclass": (lambda *where: Trainer(*ddp(*where)), Trainer.fit, EVEN),
    "a closure": (in_a_closure, lambda fit, part: fit(part), EVEN),
    "two views": (made(DDP, sgd, lambda: nn.BatchNorm1d(16)), two_views, {**EVEN, "batch": views}),
    "scaler and autocast": (with_scaler(ddp), scaled_in_half_precision, EVEN),
    "complex numbers": (spectral, plain, EVEN),
    "bf16 hook": (hooked(bf16_compress_hook), plain, EVEN),
    "8 calls": (counting, over_calls(8, True), EVEN),
    "a ring": (ddp, ring(True), EVEN),
    "polling": (alone, polling, EVEN),
    "a compensated sum": (with_residues, compensated, EVEN),
    "functional": (with_params, functional, EVEN),
}
# {case: (make, step, options, a part of the reason)}
WRONG = {
    "uneven DDP": (ddp, plain, {}, "different sizes"),
    "DataLoader": (ddp, loaded(rank=0), WHOLE, "same shard"),
    "no_sync": (ddp, accumulated(True, False), EVEN, "no_sync"),
    "scaler": (with_scaler(alone), scaled, EVEN, "own gradients"),
    "autocast": (ddp, lambda s, p: in_half_precision(s, {**p, "x": p["x"] * (1 + 0.02 * dist.get_rank())}), EVEN, ""),
    "fully_shard": (
        made(sharded, adam),
        lambda s, p: plain(s, {n: a[: 1 + dist.get_rank()] for n, a in p.items()}),
        EVEN,
        "",
    ),
    "ZeRO": (made(bare, zero), plain, EVEN, "own gradients"),
    "comm hook": (hooked(sum_hook), plain, EVEN, "2 times"),
    "hooks of tensors": (clipping_hooks, plain, EVEN, "before the sum"),
    "EMA": (with_average, averaged(False), EVEN, "only the step of process 0"),
    "schedule": (with_schedule(True), plain, EVEN, "the learning rate is 0.025 in step 2"),
    "batch normalization": (normalized, lambda s, p: plain(s, {**p, "y": p["y"].flip(0)}), EVEN, ""),
    # Adam nearly hides this
    "a factor of 1.002": (made(bare, adam), lambda s, p: by_hand(s, p, factor=1.002), EVEN, "1.002"),
    "reference": (alone, by_hand, {**EVEN, "reference": lambda s, p: plain(s, p, factor=2)}, "0.5 times"),
    "never summed": (counting, over_calls(2, False), EVEN, "sum"),
    "a limit before the sum": (
        alone,
        limited(lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1e3)),
        EVEN,
        "with larger gradients",
    ),
    "a small limit": (alone, limited(lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.1)), EVEN, "clips"),
    "a step that is skipped": (alone, skipping, EVEN, "not finite"),
    "weights": (ddp, weighted, EVEN, "no sum over examples"),
    "warm-up": (warmed_up, plain, EVEN, "own gradients"),
    "a critic": (two_losses, critic_not_summed, EVEN, "[0].weight, [0].bias"),
    "gradients that are never set to 0": (counting, never_zeroed, EVEN, "zero_grad"),
    "a gather that is not awaited": (ddp, gathering, EVEN, "wait"),
    "a ring that is not awaited": (ddp, ring(False), EVEN, "wait"),
    "one network in DDP": (two_networks, both, EVEN, "running statistics"),
    "decay in an optimizer": (
        made(bare, lambda net: Decaying(net.parameters(), lr=0.1)),
        plain,
        EVEN,
        "a multiple of the parameters",
    ),
    "a moment of own gradients": (made(bare, Lion), plain, EVEN, "state[0.weight].exp_avg"),
    "gradients that one process adds up": (ddp, zeroed_by_others, EVEN, "zero_grad"),
    "a queue of own inputs": (made(partial(DDP, broadcast_buffers=False), layer=Queue), plain, EVEN, "own statistics"),
    "only the first half is summed": (made(sharded), first_half_only, EVEN, "uses only examples 0 to 5 of 12"),
    "a layer that is frozen on one": (alone, frozen_on_one, EVEN, "but one does not"),
    "a climb of each process": (ddp, climbing, EVEN, "before the sum"),
    "a mean that is not divided": (with_mean, sum_of_means, EVEN, "mean); compute it from all examples"),
}
UNKNOWN = {
    "random numbers": (ddp, noisy, EVEN, "random numbers"),
    "nothing is trained": (lambda rank, world: [], lambda state, part: None, EVEN, "no array that is found"),
}
# {case: (make, step, options, a part of the notes)}
NOTED = {
    "an average in an attribute": (made(DDP, layer=Center), plain, EVEN, "running"),
    "an attribute of process 0": (made(DDP, layer=lambda: Largest(0)), plain, EVEN, "different state (1.largest)"),
    "an attribute of process 1": (made(DDP, layer=lambda: Largest(1)), plain, EVEN, "different state (1.largest)"),
    "moments of own gradients": (with_moments, sum_of_moments, EVEN, "moments"),
    "a line that did not run": (ddp, logging, EVEN, "line "),
}
TABLES = {"RIGHT": RIGHT, "WRONG": WRONG, "UNKNOWN": UNKNOWN, "NOTED": NOTED}

if __name__ == "__main__":
    table, case = sys.argv[1:]
    make, step, options, *_ = TABLES[table][case]
    report = check.parallel(make, step, **{"batch": batch, "processes": (2,), **options})
    print(json.dumps({"status": report.status, "line": report.line, **asdict(report)}))
