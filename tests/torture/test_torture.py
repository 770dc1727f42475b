"""The torture test notices planted faults."""

import random

import pytest
import torture

from gluon_mgpu.training import checkpoint


@pytest.fixture
def box(tmp_path):
    for name in ("box", "data"):
        (tmp_path / name).mkdir()
    torture.table.Runs(tmp_path / "data")
    return torture.Box(random.Random(1), tmp_path / "box", tmp_path / "data", {})


@pytest.mark.slow
def test_a_run_killed_while_it_saves_has_the_bits_of_a_whole_run_and_other_bits_are_noticed(box):
    plan = {"impl": "scratch", "dataset": "synthetic", "limit": 200, "gpus": 2, "seed": 2, "epochs": 20}
    fault = torture.Fault(box.rng, 0, 1000)
    fault.which, fault.while_saving = torture.signal.SIGKILL, True
    box.go_on(plan, fault)
    box.finish(plan)
    arrays, facts = checkpoint.load(box.out / "checkpoint.npz")
    (box.out / "checkpoint.npz").write_bytes(checkpoint.packed({**arrays, "b1": arrays["b1"] + 1e-6}, facts))
    with pytest.raises(AssertionError, match="b1"):
        box.finish(plan)


@pytest.mark.parametrize("reader", torture.READERS)
def test_no_input_of_a_reader_raises_another_error_and_one_that_does_is_noticed(reader, monkeypatch, capsys):
    make, _ = torture.READERS[reader]
    assert make(random.Random(3)) == make(random.Random(3))
    assert torture.fuzz(reader, 40, 1) == 0
    monkeypatch.setitem(torture.READERS, reader, (make, lambda folder: [][0]))
    assert torture.fuzz(reader, 1, 1) == 1 and "IndexError" in capsys.readouterr().err
