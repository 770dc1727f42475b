"""Scenarios in which disks and files fail: full, read-only and slow disks, failing calls, damaged files, the clock."""

import errno
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

from box import Skipped, draw_plan

CHECKPOINT_BYTES = 520_000  # about the size of LeNet's
DATA = Path(os.environ.get("GLUON_MGPU_DATA") or "/nowhere") / "fashion-mnist"


def disk(rng, box):
    """A disk that is full or out of inodes from the start or later, or becomes read-only; then it has space again."""
    plan, out = draw_plan(rng), box.folder / "runs" / "run"
    kind = rng.choice(("small", "inodes", "filled later", "read-only", "read-only later"))
    size = int(rng.uniform(0.1, 3) * CHECKPOINT_BYTES) if kind == "small" else 64 << 20
    box.mount(out, f"size={max(size, 4096)}" + (f",nr_inodes={rng.randint(1, 5)}" if kind == "inodes" else ""))
    delay = rng.uniform(0, box.usual_seconds(plan)) if "later" in kind else 0

    def spoil(box, process, sent):
        time.sleep(delay)
        while "read-only" in kind and not box.mount(out, "ro", again=True) and process.poll() is None:
            time.sleep(0.001)  # a file is being written
        if "filled" in kind:
            subprocess.run(["dd", "if=/dev/zero", f"of={out.parent / 'run' / 'ballast'}", "bs=4k"], capture_output=True)

    if kind == "read-only":
        box.mount(out, "ro", again=True)
    done = box.train(plan, "--out", out, faults=[spoil] if delay else [])
    if kind in ("inodes", "read-only", "small") and done.status == 0:
        box.require(size > CHECKPOINT_BYTES, f"succeeds on a disk that is {kind}", done)
    box.mount(out, "rw,size=64m,nr_inodes=1000", again=True)
    (out / "ballast").unlink(missing_ok=True)
    box.finish(plan, out)
    subprocess.run(["umount", str(out)], check=True)


def preloaded(rng, box, **variables):
    """The environment of a run with preload.c."""
    library = box.cache / "preload.so"
    if not shutil.which("cc"):
        raise Skipped("needs a C compiler")
    if not library.exists():
        source = Path(__file__).with_name("preload.c")
        built = f"{library}.{box.folder.parent.name}"  # another scenario may be building it too
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
        os.replace(built, library)
    values = {f"TORTURE_{name.upper()}": str(value) for name, value in variables.items()}
    return {"LD_PRELOAD": str(library), **values}


def calls(rng, box):
    """Some calls that open, read, write, rename or lock the run's files fail with ENOSPC or EIO, or are slow."""
    plan, out = draw_plan(rng), box.folder / "runs" / "run"
    for _ in range(rng.randint(1, 3)):
        failing = {
            "errno": rng.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)),
            "first": int(2 ** rng.uniform(0, 7)),
            "count": rng.choice((1, 2, 1000000)),
        }
        faults = rng.choice((failing, failing, {"delay": rng.choice((1000, 20000, 100000))}))
        begun = any((out / name).exists() for name in ("config.json", "checkpoint.npz"))
        environment = preloaded(rng, box, path="runs/run", **faults)
        done = box.train({} if begun else plan, "--resume" if begun else "--out", out, environment=environment)
        if "delay" in faults:
            box.require(done.status == 0, "fails on a slow disk", done)
        box.check_checkpoint(out)
    box.finish(plan, out)


def clock(rng, box):
    """The time of day jumps forward and back every second."""
    plan, out = draw_plan(rng), box.folder / "runs" / "run"
    seconds = rng.choice((-(10**9), -3600, -1, 3600, 10**8, 10**9))
    done = box.train(plan, "--out", out, environment=preloaded(rng, box, jump=seconds))
    box.require(done.status == 0, "fails if the clock jumps", done)
    box.same_bits(out, box.undisturbed(plan), done)


def file_size(rng, box):
    """A limit on the size of files, which is reached at some point of a file that is being written."""
    plan, out = draw_plan(rng), box.folder / "runs" / "run"
    most = int(rng.uniform(4000, 2 * CHECKPOINT_BYTES))  # standard error is a file too
    done = box.train(plan, "--out", out, limits={resource.RLIMIT_FSIZE: most})
    box.require(done.status in (0, 1) and (done.status or most > CHECKPOINT_BYTES // 2), "wrong status", done)
    box.finish(plan, out)


def damage(rng, path, other):
    """Damage a file. Returns what was done, and whether its content is still valid in itself."""
    content, kind = (
        path.read_bytes(),
        rng.choice(
            (
                "truncated",
                "flipped",
                "inserted",
                "zeros",
                "swapped",
                "empty",
                "folder",
                "FIFO",
                "loop",
                "missing",
                "socket",
            )
        ),
    )
    path.unlink()
    place = rng.randrange(len(content))
    if kind == "truncated":
        path.write_bytes(content[:place])
    elif kind == "flipped":
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :])
    elif kind == "inserted":
        path.write_bytes(content[:place] + rng.randbytes(rng.randint(1, 100)) + content[place:])
    elif kind == "zeros":
        path.write_bytes(content[:place] + bytes(len(content) - place))
    elif kind == "swapped":
        shutil.copy(other, path)
    elif kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "socket":
        os.mknod(path, 0o140644)
    return kind


def contents(folder):
    """{name: (kind, content)} of a folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        regular = path.is_file() and not path.is_symlink()
        found[path.name] = (path.lstat().st_mode, path.read_bytes() if regular else None)
    return found


def damaged(rng, box):
    """A damaged file of a run: it is refused and everything is left as it was, or it does not matter."""
    plan, run = draw_plan(rng), box.folder / "runs" / "run"
    shutil.copytree(box.undisturbed(plan), run)
    name = rng.choice(("checkpoint.npz", "checkpoint.npz", "config.json", "metrics.jsonl", "curves.png"))
    if name == "config.json" and rng.random() < 0.7:
        (run / "checkpoint.npz").unlink()  # else config.json is not read
    kind = damage(rng, run / name, box.undisturbed(draw_plan(rng)) / name)
    before, whole = contents(run), {**plan, "epochs": plan["epochs"] + 1}
    more = [] if plan.get("schedule") == "cosine" else [f"--epochs={whole['epochs']}"]
    command = rng.choice(("resume", "resume", "resume", "evaluate"))
    if command == "evaluate":
        done = box.run(["python", "-m", "gluon_mgpu", "evaluate", run], paths=[])
    else:
        done = box.train({}, "--resume", run, *more)
    box.check_checkpoint(run) if done.status == 0 and command == "resume" else None
    if command == "evaluate" or (done.status and name in ("checkpoint.npz", "config.json")):
        box.require(contents(run) == before, f"{name}: {kind}: changes the files", done)
    readable = kind in ("missing", "swapped") or name in ("metrics.jsonl", "curves.png")
    unread = name == "config.json" and (run / "checkpoint.npz").exists()
    if not (readable or unread or (name == "config.json" and kind in ("flipped", "inserted"))):
        box.require(done.status in (1, 2), f"{name}: {kind}: is accepted", done)
    elif done.status == 0 and command == "resume" and kind != "swapped" and name != "config.json":
        box.same_bits(run, box.undisturbed(whole if more else plan), done)


def damaged_data(rng, box):
    """A damaged file of a data set is refused."""
    if not DATA.is_dir():
        raise Skipped("GLUON_MGPU_DATA has no fashion-mnist")
    data = box.folder / "runs" / "data"
    data.mkdir()
    for path in DATA.iterdir():
        shutil.copy(path, data)
    chosen = rng.choice(sorted(data.iterdir()))
    kind = damage(rng, chosen, rng.choice([path for path in sorted(data.iterdir()) if path != chosen]))
    before = contents(data)
    plan = {**draw_plan(rng), "dataset": "fashion-mnist", "limit": 200, "epochs": 1, "warmup-epochs": 0}
    done = box.train(plan, "--data-dir", data)
    box.require(done.status in (1, 2), f"{chosen.name}: {kind}: is accepted", done)
    box.require(contents(data) == before, f"{chosen.name}: {kind}: changes the files", done)


SCENARIOS = {
    "disk": (disk, 2),
    "calls": (calls, 2),
    "clock": (clock, 0.5),
    "file size": (file_size, 0.5),
    "damaged": (damaged, 3),
    "damaged data": (damaged_data, 1),
}
