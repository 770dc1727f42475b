"""The workers of a run as each of them sees them: what it sums with the others, and what it agrees on with them.

Gradients go over Horovod or over MXNet's own parameter servers; all else over `watch`.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import contextmanager

from gluon_mgpu import __version__, engine
from gluon_mgpu.distributed import watch
from gluon_mgpu.distributed.place import asked, check_compress
from gluon_mgpu.errors import BetweenSteps, Error, UsageError
from gluon_mgpu.settings import shard_sizes

NAMING = 5.0  # seconds within which a loss is named, where an operator noticed it first


class Alone:
    """One process, which has nobody to ask."""

    rank, count = 0, 1

    def meet(self, devices):
        return [devices]

    def gather(self, value):
        return [value]

    def part(self, n):
        return slice(0, n)

    def shown(self):
        return ()


ALONE = Alone()


class Workers:
    """Several processes. rank: this one's, from 0; count: how many there are."""

    def __init__(self, store, member, rank, count):
        self.store, self.member, self.rank, self.count = store, member, rank, count
        self.gather, self.ask_to_stop = member.gather, member.ask_to_stop

    def meet(self, devices):
        """How many devices each worker has. devices: how many this one has."""
        self.devices = self.gather(devices)
        return self.devices

    def part(self, n):
        """The slice of n examples that this worker's devices take, where all devices of the run have even parts."""
        before = sum(self.devices[: self.rank])
        sizes = shard_sizes(n, sum(self.devices))
        start = sum(sizes[:before])
        return slice(start, start + sum(sizes[before : before + self.devices[self.rank]]))

    def shown(self):
        return (f"as worker 0 of {self.count}",)

    def agree(self, facts):
        """Raises UsageError where a worker's facts are not worker 0's. facts: {name: what JSON can hold}."""
        first, *others = self.gather({"version": __version__, **facts})
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    raise UsageError(
                        f"worker {rank} has {name} {other.get(name)} where worker 0 has {first.get(name)}: start all "
                        "workers with the same options, data and version"
                    )

    @property
    def stopping(self):
        """Whether one of the workers asked to stop."""
        return self.member.stopping.is_set()

    def allreduce(self, array, key):
        """Sum an NDArray over all workers, in place and behind Python, as any operator. key: its number, the same in
        all workers; the lower, the sooner it is needed."""
        self.store.allreduce(array, key)

    def broadcast(self, arrays):
        """{name: NumPy array}: those of worker 0. The others' must have the same names, shapes and types."""
        from mxnet import nd

        given = {}
        for key, (name, array) in enumerate(arrays.items()):
            values = array if self.rank == 0 else array * 0
            given[name] = nd.array(values, dtype=array.dtype)
            self.store.allreduce(given[name], f"broadcast {key}")
        return {name: array.asnumpy() for name, array in given.items()}


class Horovod:
    """A ring of workers. Source: Horovod 0.28.1's horovod.mxnet."""

    def __init__(self, compress):
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise Error(f"Horovod is not installed for this MXNet ({error}): `make horovod` builds it") from None
        self.hvd, self.compress = hvd, compress
        hvd.init()

    def allreduce(self, array, key):
        exact = self.compress is None or not isinstance(key, int)
        sent = array if exact else array.astype("float16")
        self.hvd.allreduce_(sent, average=False, name=str(key), priority=-key if isinstance(key, int) else 0)
        if not exact:
            sent.astype("float32").copyto(array)

    def first_ones(self, text):
        """The text of worker 0."""
        from mxnet import nd

        sent = nd.array(list(text.encode().ljust(256)), dtype="int32")
        return bytes(self.hvd.broadcast(sent, root_rank=0, name="address").asnumpy().astype("uint8")).decode().strip()

    def close(self):
        self.hvd.shutdown()


class DistSync:
    """MXNet's parameter servers (ps-lite), each with a part of the arrays. They sum, and update nothing."""

    def __init__(self, compress):
        import mxnet as mx

        self.kv = mx.kv.create("dist_sync")
        self.threshold, self.compressing, self.known = compress, False, set()

    def allreduce(self, array, key):
        from mxnet import nd

        name = str(key)
        if name not in self.known:
            if self.threshold and isinstance(key, int) and not self.compressing:
                # From here on only: parameters are broadcast as they are.
                self.kv.set_gradient_compression({"type": "2bit", "threshold": self.threshold})
                self.compressing = True
            self.known.add(name)
            self.kv.init(name, nd.zeros(array.shape, dtype=array.dtype))
        priority = -key if isinstance(key, int) else 0
        if not self.compressing:
            self.kv.pushpull(name, array, out=array, priority=priority)
        else:  # MXNet: "Compression not supported with PushPull"
            self.kv.push(name, array, priority=priority)
            self.kv.pull(name, out=array, priority=priority)

    def close(self):
        self.kv.__del__()  # waits for the other workers, and lets the servers go
        self.kv.handle = None


@contextmanager
def join(kvstore="local", compress=None, model="lenet"):
    """This process as one of the Workers of a run, or ALONE for "local".

    kvstore: "local", "horovod" or "dist_sync". compress: what is sent of a gradient: "fp16" (horovod), or "2bit:0.5"
    for above 0.5, below -0.5 or neither, what is left being sent with a later step (dist_sync). model: of `Settings`.
    Waits until all are there. Where one is lost later, this process ends with a line that names it.
    Raises UsageError where the process was not started for that, Error where Horovod is missing or nobody answers.
    """
    here = asked(kvstore)
    check_compress(compress, here, model)
    if kvstore == "local":
        yield ALONE
        return
    hub = None
    if kvstore == "horovod":
        store = Horovod(compress)
        if here.rank == 0:
            host = os.environ.get("HOROVOD_HOSTNAME", "localhost")
            hub = watch.Hub(host, 0, _names(here))
            address = f"{host} {hub.port}"
        host, port = store.first_ones(address if hub else "").split()
        member = watch.Member(host, int(port), str(here))
    else:
        member = watch.Member(here.root, here.port + 1, str(here))
        _ps_lite(member)
        store = DistSync(compress and float(compress.partition(":")[2]))
    stopped = None
    try:
        yield Workers(store, member, here.rank, here.workers)
    except BetweenSteps as error:  # as all workers do
        stopped = error
    except (Error, KeyboardInterrupt) as error:
        said = (str(error), error.exit_status) if isinstance(error, Error) else ("interrupted", 130)
        member.failed(*said)
        raise
    except Exception as error:
        time.sleep(NAMING)  # the watch may say who was lost, and end this process
        member.failed(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}", 1)
        raise
    store.close()
    member.done()
    if hub:
        hub.close()
    if stopped:
        raise stopped


def _names(here):
    return [f"worker {i}" for i in range(here.workers)] + [f"server {i}" for i in range(here.servers)]


def _ps_lite(member):
    """What ps-lite reads from the environment and a user cannot be expected to know."""
    os.environ.setdefault("DMLC_NODE_HOST", member.own_address)
    os.environ.pop("PORT", None)  # ps-lite would listen there, in every process


def serve(here):
    """What a server's and the scheduler's process do until the workers are done. here: a Place of dist_sync."""
    engine.configure(1)
    for which in (signal.SIGINT, signal.SIGTERM):  # MXNet's loop would not come back to Python for them
        signal.signal(which, signal.SIG_DFL)
    if here.role == "scheduler":

        def end(line):
            os.write(2, f"error: the scheduler: {line}\n".encode())
            time.sleep(watch.BEAT)  # until the others have read it
            os._exit(1)

        _refuse_port(here.root, here.port)
        hub, member = watch.Hub(here.root, here.port + 1, _names(here), end), None
        os.environ.setdefault("DMLC_NODE_HOST", hub.listener.getsockname()[0])
        os.environ.pop("PORT", None)
    else:
        member = watch.Member(here.root, here.port + 1, str(here))
        _ps_lite(member)
    # MXNet, imported by a server, would serve at once, and unpickle what it is sent as an optimizer.
    os.environ["DMLC_ROLE"] = "worker"
    import mxnet as mx
    from mxnet.base import _LIB, check_call

    os.environ["DMLC_ROLE"] = here.role
    kv = mx.kv.create("dist_sync")

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    def no_command(which, body, _):
        print(f"gluon_mgpu: {here}: a worker's command is ignored: servers sum, and update nothing", file=sys.stderr)

    check_call(_LIB.MXKVStoreRunServer(kv.handle, no_command, None))
    if member:
        member.done()
    else:
        hub.close()


def _refuse_port(host, port):
    watch.Hub(host, port, ()).close()
