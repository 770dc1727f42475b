"""A box finds each kind of broken invariant; scenarios repeat from their seed. `make test-faults` also runs a test that
loses each process of a run, and prints which, when, the seconds until every process had ended, and what was left.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import box
import fuzz
import numpy as np
import pytest
import runs
import torture
from scenarios import Send

from gluon_mgpu.training import checkpoint, records


@pytest.fixture
def empty(tmp_path):
    """A box for the commands of a test."""
    (tmp_path / "box").mkdir()
    return box.Box(random.Random(1), tmp_path / "box", tmp_path, isolated=False)


BROKEN = {
    "did not end in time": "import time; time.sleep(60)",
    "processes are left": "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "unexpected exit status": "import os; os._exit(3)",
    "failed without an error line": "import os; os._exit(1)",
    "2 error lines": "import sys; sys.exit('error: x\\nerror: y')",
    "shows 'Traceback'": "import sys; sys.exit('error: x\\nTraceback (most recent call last):')",
    "shows 'SIGSEGV'": "import sys; sys.exit('error: worker 1 (process 7) was killed by SIGSEGV')",
    "shows 'Aborted'": "print('[1]<stdout>:Aborted')",
    "files outside the run's folder changed": "open('new', 'w')",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_box_finds_what_breaks_an_invariant_and_ends_all_its_processes(line, empty, monkeypatch):
    monkeypatch.setattr(box, "SECONDS_TO_END", 0.5)
    seconds = 2 if "in time" in line else 60
    with pytest.raises(box.Violation, match=line):
        empty.run([sys.executable, "-c", BROKEN[line]], seconds=seconds)
    assert not empty.processes()


def test_a_box_finds_other_bits_and_an_incomplete_checkpoint(empty):
    for name, number in (("a", 1), ("b", 1), ("c", 2)):
        (empty.folder / name).mkdir()
        array = np.full(3, number, np.float32)
        checkpoint.save(empty.folder / name / "checkpoint.npz", {"W": array}, {"history": []})
    empty.same_bits(empty.folder / "a", empty.folder / "b")
    with pytest.raises(box.Violation, match="parameters differ"):
        empty.same_bits(empty.folder / "a", empty.folder / "c")
    path = empty.folder / "a" / "checkpoint.npz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(box.Violation, match="not complete"):
        empty.check_checkpoint(empty.folder / "a")


def test_after_sigterm_nothing_is_left(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, torture.__file__, "--only", "readers"], env=environment)
    while not list(tmp_path.glob("torture-*/torture-*")):
        time.sleep(0.1)
    process.terminate()
    assert process.wait(60) == 130
    assert not list(tmp_path.iterdir()) and not box.processes(tmp_path)


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_command_killed_at_random_moments_and_resumed_has_the_bits_of_a_whole_run(kills, empty):
    extras = {"momentum": 0.9, "weight-decay": 0.001, "schedule": "cosine", "warmup-epochs": 0.5}
    plan = {"dataset": "synthetic", "limit": 300, "gpus": 2, "batch-size": 32, "epochs": 6, "seed": 2, **extras}
    seconds = empty.usual_seconds(plan)
    for kill in range(kills):
        fault = Send(empty.rng, seconds, [signal.SIGKILL])
        if kill == 0:
            fault.moment = "epoch"  # so that there is a checkpoint
        empty.go_on(plan, faults=[fault])
        assert kill or empty.check_checkpoint()
        empty.finish(plan)
        shutil.rmtree(empty.out)


@pytest.mark.parametrize("reader", fuzz.READERS)
def test_inputs_repeat_from_their_seed_and_readers_refuse_them(reader):
    make, read = fuzz.READERS[reader]
    for n in range(8):
        content = make(random.Random(n))
        assert content == make(random.Random(n))
        fuzz.check(read, content)


PROMISED = 30  # seconds
ROLES = {"dist_sync": ("worker 0", "worker 1", "server 0", "scheduler"), "horovod": ("worker 0", "worker 1")}
# {moment: (what the run has printed, the minimum and maximum seconds afterward)}
MOMENTS = {
    "starting": (b"", (0, 0)),
    "training": (b"running on", (0.3, 0.3)),
    "epoch": (b"epoch 1", (0, 0)),
    "any": (b"running on", (0, 3)),
    "later": (b"running on", (3, 6)),
}
CASES = [
    pytest.param(engine, who, how, when, marks=runs.MARKS[engine])
    for engine, roles in ROLES.items()
    for who in roles
    for how, when in [*(("SIGKILL", moment) for moment in MOMENTS), ("SIGSTOP", "training")]
]
PLAN = {"dataset": "synthetic", "limit": 4096, "seed": 1, "epochs": 500, "workers": 2}
HOROVODRUNS = re.compile(r"Process name: (\d+)\s+Exit code: \d+")


@pytest.mark.slow
@pytest.mark.parametrize("engine, who, how, when", CASES)
def test_if_a_process_is_lost_all_end_one_line_names_it_and_the_run_goes_on(engine, who, how, when, empty):
    printed, delay = MOMENTS[when]
    lost = []

    def lose(box, process, sent):
        runs.wait(lambda: who in runs.processes(str(box.out)))
        runs.wait(lambda: printed in (box.folder / "out").read_bytes())
        time.sleep(random.Random(f"{engine} {who} {how} {when}").uniform(*delay))
        os.kill(runs.processes(str(box.out))[who], getattr(signal, how))
        lost.append(time.monotonic())

    done = empty.go_on({**PLAN, "kvstore": engine}, faults=[lose])  # a box requires that no process is left
    seconds = time.monotonic() - lost[0]
    errors = runs.errors(done.err)
    assert done.status != 0 and seconds < PROMISED
    named = re.search(f"{who} .*was (lost|killed)|lost contact with (the )?{who}:", "".join(errors))
    by_horovodrun = engine == "horovod" and who[-1] in HOROVODRUNS.findall(done.err)
    assert len(errors) <= 1 and (named or by_horovodrun), done.err
    print(f"\n| {engine} | {who} | {how} | {when} | {seconds:.1f} s | {resumed(empty)} |")


def resumed(empty):
    """What was left of the run. It must be complete, and resuming it must work."""
    if not empty.check_checkpoint():
        return "no checkpoint yet"
    before = records.last(empty.out)[3]
    assert empty.train({"epochs": len(before.history) + 1}, "--resume", empty.out).status == 0
    assert len(records.last(empty.out)[3].history) == len(before.history) + 1
    return f"resumed {before}"
