"""Programs in other processes, and what they print: one-line messages, and notices only from worker 0."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from runs import HORIZON, alive, wait

from gluon_mgpu.support import log, subprocesses
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.support.subprocesses import Finished

CHILD = """
import subprocess, sys, time
try:
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)  # a child of its own
    {}
except KeyboardInterrupt:
    open({!r}, "w")
"""


def run(code, **options):
    return subprocesses.run([sys.executable, "-c", code], **options)


def test_a_program_gives_its_status_and_output_while_notices_are_passed_on(capsys, tmp_path):
    lines = []
    code = "import os, sys; print(os.getcwd()); print('a\\ngluon_mgpu: b', file=sys.stderr); sys.exit(3)"
    assert run(code, on_line=lines.append, folder=tmp_path) == (3, f"{tmp_path}\n", "a\ngluon_mgpu: b\n")
    assert lines == [f"{tmp_path}\n"] and capsys.readouterr() == ("", "gluon_mgpu: b\n")


def test_output_that_is_read_after_the_program_has_ended_is_complete():
    assert run("print(1, 2, 3, sep='\\n')", on_line=lambda _: wait(lambda: not subprocesses.running)).out == "1\n2\n3\n"


def test_a_program_does_not_wait_for_lines_that_can_no_longer_be_shown():
    def show(line):
        raise BrokenPipeError

    assert len(run("for _ in range(9999): print('x' * 99)", on_line=show, seconds=HORIZON).out) == 999900


def test_a_process_that_detached_itself_and_keeps_the_pipes_is_not_waited_for():
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid, end='')"
    finished = run(code)
    assert finished.status == 0 and alive([finished.out])
    os.kill(int(finished.out), signal.SIGKILL)


@pytest.mark.parametrize("ending, limits, status", [("sys.exit(0)", [None], 0), ("time.sleep(600)", [1, 9, 81], None)])
def test_everything_that_a_program_started_ends_with_it_or_when_its_time_is_over(ending, limits, status):
    for seconds in limits:
        finished = run(CHILD.format(ending, ""), seconds=seconds)
        if finished.out:  # there was enough time to start the child
            break
    assert finished.status == status
    wait(lambda: not alive([int(finished.out)]))


def test_ctrl_c_reaches_the_program_which_may_save_and_then_everything_ends(tmp_path):
    child = [sys.executable, "-c", CHILD.format("time.sleep(600)", str(tmp_path / "saved"))]
    code = f"from gluon_mgpu.support import subprocesses; subprocesses.run({child}, on_line=print)"
    parent = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGINT)
    assert parent.wait(HORIZON) != 0 and (tmp_path / "saved").exists()
    wait(lambda: not alive([pid]))


@pytest.mark.parametrize(
    "status, err, kind, text",
    [
        (1, "gluon_mgpu: notice\nerror: no space\n", Error, "x: no space"),
        (2, "error: lr=0: must be above 0\n", UsageError, "x: lr=0: must be above 0"),
        (1, "Traceback:\ngluon_mgpu.support.errors.UsageError: no\n", UsageError, "x: no"),
        (7, "something\nlast line\n", Error, "last line"),
        (-9, "", Error, "SIGKILL"),
        (None, "error: too early\n", Error, "fewer steps"),
    ],
)
def test_a_failure_becomes_an_error_in_the_programs_own_words(status, err, kind, text):
    with pytest.raises(Error) as caught:
        subprocesses.raise_for_status("x", Finished(status, "", err), advice="use fewer steps")
    assert type(caught.value) is kind and text in str(caught.value)
    subprocesses.raise_for_status("x", Finished(0, "", "error: none"))


def test_programs_that_run_in_threads_can_be_killed_and_lines_without_an_end_are_read_in_pieces():
    pieces = []
    program = "import sys, time; sys.stdout.write('x' * 10**6); sys.stdout.flush(); time.sleep(600)"
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run, program, on_line=pieces.append)
        wait(lambda: sum(map(len, pieces)) > 900_000)  # the last piece is not complete
        subprocesses.kill_running()
        assert done.result(HORIZON).status == -signal.SIGKILL
    assert max(map(len, pieces)) <= subprocesses.LONGEST


WORKERS = [({}, None, 1), *(({name: str(rank)}, rank, rank == 0) for name in log.RANKS for rank in (0, 1))]


@pytest.mark.parametrize("environment, rank, notices", WORKERS)
def test_a_worker_knows_its_rank_and_only_worker_0_prints_notices(environment, rank, notices, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    log.say("notice")
    assert log.rank() == rank and capsys.readouterr() == ("", notices * "gluon_mgpu: notice\n")


def test_a_message_is_one_line_without_control_characters(capsys):
    for say in (log.say, log.error):
        say("é🔥 a\nb\r\x1b[31m\x9b\u2028\u202e\udcff")
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1 and said.rstrip("\n").isprintable() and "é🔥 a" in said
        say("a\u3000b")  # a space in the name of a folder
        assert "a\u3000b" in capsys.readouterr().err
