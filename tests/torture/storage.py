"""Scenarios in which disks and files fail: full, read-only and slow disks, failing calls, damaged files, the clock."""

import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

from box import ROOT, Skipped, be_ordinary

from gluon_mgpu.training import checkpoint

DATA = Path(os.environ.get("GLUON_MGPU_DATA") or "/nowhere") / "fashion-mnist"


def checkpoint_size(box, plan):
    return (box.undisturbed(plan) / "checkpoint.npz").stat().st_size


def disk(rng, box):
    """A disk that is full or out of inodes from the start or later, or becomes read-only; then it has space again."""
    plan = box.plan()
    needed = checkpoint_size(box, plan)
    kind = rng.choice(("small", "inodes", "filled later", "read-only", "read-only later"))
    size = int(rng.uniform(0.1, 3) * needed) if kind == "small" else 64 << 20
    box.mount(box.out, f"size={size}" + (f",nr_inodes={rng.randint(1, 4)}" if kind == "inodes" else ""))
    delay = rng.uniform(0, box.usual_seconds(plan))

    def spoil(box, process, sent):
        time.sleep(delay)
        while "read-only" in kind and not box.mount(box.out, "ro", again=True) and process.poll() is None:
            time.sleep(0.001)  # a file is being written
        if "filled" in kind:
            subprocess.run(["dd", "if=/dev/zero", f"of={box.out / 'ballast'}", "bs=4k"], capture_output=True)

    if kind == "read-only":
        box.mount(box.out, "ro", again=True)
    done = box.train(plan, "--out", box.out, faults=[spoil] if "later" in kind else [])
    if kind in ("inodes", "read-only") or size < needed:
        box.require(done.status == 1, f"succeeds on a disk that is {kind}", done)
    box.mount(box.out, "rw,size=64m,nr_inodes=1000", again=True)
    (box.out / "ballast").unlink(missing_ok=True)
    box.finish(plan)
    subprocess.run(["umount", str(box.out)], check=True)


def preloaded(box, **variables):
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
    plan = box.plan()
    for _ in range(rng.randint(1, 3)):
        failing = {
            "errno": rng.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)),
            "first": int(2 ** rng.uniform(0, 7)),
            "count": rng.choice((1, 2, 1000000)),
        }
        faults = rng.choice((failing, failing, {"delay": rng.choice((1000, 20000, 100000))}))
        done = box.go_on(plan, environment=preloaded(box, path="runs/run", **faults))
        if "delay" in faults:
            box.require(done.status == 0, "fails on a slow disk", done)
        box.check_checkpoint()
    box.finish(plan)


def clock(rng, box):
    """The time of day jumps forward and back every second."""
    seconds = rng.choice((-(10**9), -3600, -1, 3600, 10**8, 10**9))
    plan = box.plan()
    done = box.train(plan, "--out", box.out, environment=preloaded(box, jump=seconds))
    box.require(done.status == 0, "fails if the clock jumps", done)
    box.finish(plan)


def file_size(rng, box):
    """A limit on the size of files, which is reached at some point of a file that is being written."""
    plan = box.plan()
    needed = checkpoint_size(box, plan)
    most = int(rng.uniform(4000, 2 * needed))  # standard error is a file too, but smaller
    done = box.train(plan, "--out", box.out, limits={resource.RLIMIT_FSIZE: most})
    box.require(done.status == (1 if most < needed else 0), "wrong status", done)
    box.finish(plan)


def unreadable(path, content, *_):
    path.write_bytes(content)
    path.chmod(0)


def from_another_version(path, content, place, other):
    """A checkpoint of another format, or another version or name in config.json and metrics.jsonl."""
    path.write_bytes(content)
    if path.suffix == ".npz":
        arrays, facts = checkpoint.load(path)
        checkpoint.save(path, arrays, {**facts, "format": facts["format"] + (-1) ** place})
    elif path.suffix in (".json", ".jsonl"):
        path.write_bytes(content.replace(b'"version": "', b'"version": "9').replace(b'"epoch"', b'"number"'))


# {kind: function(path, its content, a place in the content, another file)}
DAMAGES = {
    "truncated": lambda path, content, place, other: path.write_bytes(content[: place // 2]),
    "flipped": lambda path, content, place, other: path.write_bytes(
        content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
    ),
    "inserted": lambda path, content, place, other: path.write_bytes(content[:place] + b"\0" + content[place:]),
    "zeros": lambda path, content, place, other: path.write_bytes(content[:place] + bytes(len(content) - place)),
    "swapped": lambda path, content, place, other: shutil.copy(other, path),
    "empty": lambda path, *_: path.touch(),
    "folder": lambda path, *_: path.mkdir(),
    "FIFO": lambda path, *_: os.mkfifo(path),
    "loop": lambda path, *_: path.symlink_to(path.name),
    "socket": lambda path, *_: os.mknod(path, stat.S_IFSOCK | 0o644),
    "missing": lambda path, *_: None,
    "unreadable": unreadable,
    "version": from_another_version,
}


def damage(rng, path, other, kinds=tuple(DAMAGES)):
    """Damage a file; returns how."""
    content, kind = path.read_bytes(), rng.choice(kinds)
    command = [sys.executable, "-c", "import gluon_mgpu"]
    if kind == "unreadable" and subprocess.run(command, cwd=ROOT, preexec_fn=be_ordinary).returncode:
        raise Skipped("root may read this project only as root")
    path.unlink()
    DAMAGES[kind](path, content, rng.randrange(len(content)), other)
    return kind


def contents(folder):
    """{name: (kind, content)} of a folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        regular = path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)
        found[path.name] = (path.lstat().st_mode, path.read_bytes() if regular else None)
    return found


def damaged(rng, box):
    """A damaged file of a run: it is refused and everything is left as it was, or it does not matter."""
    plan = box.plan()
    shutil.copytree(box.undisturbed(plan), box.out)
    name = rng.choice(("checkpoint.npz", "checkpoint.npz", "config.json", "metrics.jsonl", "curves.png"))
    kind = damage(rng, box.out / name, box.undisturbed(box.plan()) / name)
    before, read, ordinary = contents(box.out), name == "checkpoint.npz", kind == "unreadable"
    if rng.random() < 0.3:
        done = box.run([sys.executable, "-m", "gluon_mgpu", "evaluate", box.out], ordinary=ordinary)
        box.require(contents(box.out) == before, f"{name}: {kind}: evaluate changes the files", done)
    else:
        done = box.train({}, "--resume", box.out, ordinary=ordinary)
        if done.status == 0 and not (read and kind == "swapped"):
            box.finish(plan)
        elif done.status:
            box.require(contents(box.out) == before, f"{name}: {kind}: changes the files", done)
    if read and kind != "swapped":
        box.require(done.status in (1, 2), f"{name}: {kind}: is accepted", done)


def damaged_data(rng, box):
    """A damaged file of a data set is refused."""
    if not DATA.is_dir():
        raise Skipped("GLUON_MGPU_DATA has no fashion-mnist")
    data = box.folder / "runs" / "data"
    data.mkdir()
    for path in DATA.iterdir():
        shutil.copy(path, data)
    chosen = rng.choice(sorted(data.iterdir()))
    other = rng.choice([path for path in sorted(data.iterdir()) if path != chosen])
    kind = damage(rng, chosen, other, [kind for kind in DAMAGES if kind != "version"])
    before = contents(data)
    plan = {"dataset": "fashion-mnist", "limit": 200, "epochs": 1}
    done = box.train(plan, "--data-dir", data, ordinary=kind == "unreadable")
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
