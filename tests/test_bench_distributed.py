import copy
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
from bench import compression, distributed
from click.testing import CliRunner

from gluon_mgpu.commands.common import main as cli
from gluon_mgpu.runtime.errors import Error


def result():
    """LeNet in scratch, each way, three rounds: one process takes 20, 30 and 40 ms a step, the others by the round."""
    ms = {
        ("local", True): [20.0, 30, 40],
        ("horovod", True): [25.0, 30, 50],  # 0.8, 1.0, 0.8 of one process's rate
        ("horovod", False): [20.0, 30, 40],
        ("dist_sync", True): [25.0, 60, 50],  # 0.8, 0.5, 0.8
        ("dist_sync", False): [20.0, 30, 40],
    }
    measured = [
        {
            **distributed.Subject(kvstore, "scratch", "lenet", exchange)._asdict(),
            "batch_size": 256,
            "arrays": 1,
            "array_bytes": 516272,
            "step_ms": times,
            "sent_bytes": [2e6, 3e6, 1e6],
            "received_bytes": [4e6, 6e6, 2e6],
            "cpu_ms": [{"worker 0": cpu, "server 0": cpu / 10} for cpu in (10.0, 30.0, 20.0)],
        }
        for (kvstore, exchange), times in ms.items()
    ]
    sums = [{"kvstore": kv, "bytes": 4096, "ms": [1.0, 4.0, 2.0]} for kv in ("horovod", "dist_sync")]
    return {"rounds": 3, "skipped": ["Horovod is not there"], "runs": measured, "sums": sums}


def row(lines, start):
    return next(line for line in lines if line.startswith(start))


def test_a_ratio_is_of_the_rates_of_one_round_and_is_held_against_what_was_wanted():
    lines = distributed.table(result()).splitlines()
    horovod, servers = row(lines, "Horovod, 2 workers"), row(lines, "dist_sync, 2 workers, 1 server")
    # 256 examples in the median's 30 ms
    assert "30.0 (25.0-50.0)       8533  0.80 (0.80-1.00)  0.9 not reached     2.00, 4.00  20.0, 2.0" in horovod
    assert "  0.80 (0.50-0.80)  0.75 reached " in servers
    assert "1.00 (1.00-1.00)" in row(lines, "  without the exchange") and "Horovod is not there" in lines
    # 4096 bytes in the median's 2 ms
    assert row(lines, f"{'4.1 KB':>44}").split()[2:] == ["2.00", "(1.00-4.00)", "2"]


def test_each_way_is_measured_once_a_round_and_two_processes_with_and_without_the_exchange(monkeypatch):
    asked = []

    def last(name, module, *given, **_):
        asked.append((name, module))
        if name.startswith("sums"):
            return {"ms": [1.0] * len(distributed.SUMMED)}
        counts = {"arrays": 1, "array_bytes": 4, "sent_bytes": 1.0, "received_bytes": 1.0}
        return {**counts, "step_ms": 10.0, "cpu_ms": {"worker 0": 1.0}}

    monkeypatch.setattr(distributed.own_process, "last", last)
    monkeypatch.setattr(distributed, "installed", lambda: (("horovod", "dist_sync"), []))
    found = distributed.run(("lenet", "resnet18"), rounds=3)
    assert asked == asked[: len(asked) // 3] * 3
    assert len({name for name, _ in asked}) == 3 * 5 + 2  # scratch and highlevel, and highlevel's ResNet-18; the sums
    for name, module in asked:
        launcher = "horovod.runner.launch" if "horovod" in name else "gluon_mgpu" if "dist_sync" in name else None
        assert module == (launcher or "bench.distributed")
    assert all(len(run["step_ms"]) == 3 for run in found["runs"]) and distributed.table(found)


def test_where_horovod_is_not_installed_a_line_says_so_and_the_rest_is_measured(monkeypatch):
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: None)
    kvstores, lines = distributed.installed()
    assert kvstores == ("dist_sync",) and len(lines) == 1 and "make horovod" in lines[0]


def test_a_step_over_dist_sync_sends_each_gradient_to_the_server_once_and_back_once():
    subject = distributed.Subject("dist_sync", "scratch", "lenet")
    job = {"subject": subject._asdict(), "steps": 5}
    found = distributed.in_own_processes("it", "dist_sync", "bench.distributed", job)
    assert found["arrays"] == 1 and found["array_bytes"] == 4 * (200 + 25050 + 102528 + 1290)  # LeNet's layers
    for name in ("sent_bytes", "received_bytes"):
        assert 1 < found[name] / found["array_bytes"] < 1.05, name
    assert set(found["cpu_ms"]) == {"worker 0", "worker 1", "server 0", "scheduler"}
    assert found["step_ms"] > 1 and found["cpu_ms"]["worker 0"] > 1


@pytest.mark.parametrize("kvstore", runs.ENGINES)
def test_ctrl_c_ends_every_process_of_a_run(kvstore, tmp_path):
    job = {"subject": distributed.Subject(kvstore, "scratch", "lenet")._asdict(), "steps": 100}
    given = "it", kvstore, "bench.distributed", job
    program = f"from bench import distributed; distributed.in_own_processes(*{given})"
    marked = {**os.environ, "GLUON_MGPU_TEST": str(tmp_path)}
    # with a process group of its own, as a terminal gives a command
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=marked, start_new_session=True, stderr=subprocess.PIPE, text=True) as process:
        try:
            _wait(lambda: sum(p[1:3] == ["-m", given[2]] for p in _running(str(tmp_path)).values()) >= 2)
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert "KeyboardInterrupt" in err
            _wait(lambda: not _running(str(tmp_path)))
        finally:
            for pid in _running(str(tmp_path)):
                os.kill(pid, signal.SIGKILL)


def _running(mark):
    """{pid: arguments} of the processes that were given `mark` in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"GLUON_MGPU_TEST={mark}" in (folder / "environ").read_text().split("\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
    return found


def _wait(done):
    by = time.monotonic() + 60
    while not done():
        assert time.monotonic() < by
        time.sleep(0.05)


def test_a_worker_that_fails_is_one_error():
    with pytest.raises(Error) as caught:
        distributed.in_own_processes("it", "dist_sync", "bench.no_such", {})
    assert str(caught.value).startswith("it failed: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given, said",
    [
        (["--limit", "100"], "--limit --what speed: it is for --what compression only"),
        (["--what", "compression", "--model", "lenet"], "--model --what compression: it is for --what speed only"),
    ],
)
def test_an_option_of_the_other_measurement_is_refused(given, said):
    done = CliRunner().invoke(cli.bench, ["distributed", *given])
    assert done.exit_code == 2 and said in done.output


def learned():
    trained = [
        {
            "kvstore": kvstore,
            "compress": compress,
            "accuracy": [[0.1, 0.5], [0.2, 0.7], [0.1, 0.6]],
            "seconds": [[9.0, 3.0], [9.0, 4.0], [9.0, 5.0]],
            "sent_bytes": [2e6, 3e6, 1e6],
            "received_bytes": [4e6, 6e6, 2e6],
        }
        for kvstore, kinds in compression.KINDS.items()
        for compress in kinds
    ]
    return {"seeds": [1, 2, 3], "epochs": 2, "limit": 1000, "skipped": [], "runs": trained}


def test_accuracy_is_of_the_last_epoch_and_each_kind_of_compression_has_its_line():
    lines = compression.table(learned()).splitlines()
    for name in ("horovod, no compression", "horovod, fp16", "dist_sync, no compression", "dist_sync, 2bit:"):
        # medians of 0.5, 0.7 and 0.6; of 2, 3 and 1 MB sent; of the epochs' medians 6, 6.5 and 7 s
        assert row(lines, name).split()[-6:] == ["2.00,", "4.00", "6.5", "(6.0-7.0)", "0.600", "(0.500-0.700)"]
    assert "the first 1000 examples of Fashion-MNIST" in lines[0]


@pytest.mark.parametrize("draw, found", [(distributed.draw, result()), (compression.draw, learned())])
def test_the_picture_is_a_png_also_without_horovod(draw, found, tmp_path):
    fewer = copy.deepcopy(found)
    for part in ("runs", "sums"):
        fewer[part] = [one for one in fewer.get(part, []) if one["kvstore"] != "horovod"]
    for content in (found, fewer):
        draw(content, tmp_path / "it")
        png = (tmp_path / "it").read_bytes()
        assert png[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", png[16:24])) > 300
