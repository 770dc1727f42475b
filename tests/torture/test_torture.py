"""The torture test notices planted faults."""

import random
import signal
import sys

import pytest
import torture

from gluon_mgpu.training import checkpoint


@pytest.fixture
def box(tmp_path):
    (tmp_path / "box").mkdir()
    (tmp_path / "data").mkdir()
    torture.table.Runs(tmp_path / "data")
    return torture.Box(random.Random(1), tmp_path / "box", tmp_path)


BROKEN = {
    "did not end in time": "import time; time.sleep(60)",
    "processes are left": "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)",
    "unexpected exit status": "import os; os._exit(3)",
    "failed without an error line": "import os; os._exit(1)",
    "2 error lines": "import sys; sys.exit('error: x\\nerror: y')",
    "shows 'Traceback'": "import sys; sys.exit('error: x\\nTraceback (most recent call last):')",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_command_that_breaks_a_promise_is_noticed_and_its_processes_are_ended(line, box, monkeypatch):
    monkeypatch.setattr(torture, "SECONDS_TO_END", 0.5)
    with pytest.raises(AssertionError, match=line):
        box.run([sys.executable, "-c", BROKEN[line]], seconds=1 if "in time" in line else 60)
    assert not torture.processes(box.folder)


def test_a_run_killed_after_an_epoch_has_the_bits_of_a_whole_run_and_other_bits_are_noticed(box):
    plan = {"impl": "scratch", "dataset": "synthetic", "limit": 200, "gpus": 2, "momentum": 0.9, "seed": 2}
    plan["epochs"] = 20
    kill = torture.Send(box.rng, box.uninterrupted(plan)[1])
    kill.which, kill.moment, kill.delay = signal.SIGKILL, "epoch", 0.1
    box.go_on(plan, faults=[kill])
    box.finish(plan)
    assert box.resumed == box.counts["compared"] == 1
    arrays, facts = checkpoint.load(box.out / "checkpoint.npz")
    checkpoint.save(box.out / "checkpoint.npz", {**arrays, "b1": arrays["b1"] + 1e-6}, facts)
    with pytest.raises(AssertionError, match="b1"):
        box.finish(plan)


@pytest.mark.parametrize("reader", torture.READERS)
def test_inputs_repeat_from_their_seed_and_a_reader_that_raises_another_error_is_noticed(reader, monkeypatch, capsys):
    file, make, _ = torture.READERS[reader]
    assert make(random.Random(3)) == make(random.Random(3))
    assert torture.fuzz(reader, 0.5, 1) == 0
    monkeypatch.setitem(torture.READERS, reader, (file, make, lambda folder: [][0]))
    assert torture.fuzz(reader, 60, 1) == 1 and "IndexError" in capsys.readouterr().err
