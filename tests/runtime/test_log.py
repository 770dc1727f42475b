"""What is printed on standard error: one line, whatever is in it, and notices only by worker 0."""

import pytest
from own_process import python

from gluon_mgpu.runtime import log

DIST_SYNC = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_URI": "h", "DMLC_PS_ROOT_PORT": "9091"}


PROCESSES = [  # environment, prefix of messages, number of notices
    ({}, "", 1),
    ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "worker 0: ", 1),
    ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "worker 1: ", 0),
    ({**DIST_SYNC, "DMLC_ROLE": "worker", "DMLC_TASK_ID": "1"}, "worker 1: ", 0),
    ({**DIST_SYNC, "DMLC_ROLE": "server", "DMLC_TASK_ID": "0"}, "server 0: ", 0),
    ({**DIST_SYNC, "DMLC_ROLE": "scheduler"}, "the scheduler: ", 0),
    ({"DMLC_ROLE": "boss"}, "", 1),  # `process.require` reports this
]


@pytest.mark.parametrize("environment, prefix, notices", PROCESSES)
def test_every_process_of_a_run_has_a_name_and_only_worker_0_prints_notices(environment, prefix, notices):
    done = python("from gluon_mgpu.runtime import log; log.say('notice'); print(log.who(), end='')", **environment)
    assert (done.stdout, done.stderr) == (prefix, notices * "gluon_mgpu: notice\n")


def test_a_message_is_one_line_without_control_characters(capsys, monkeypatch):
    monkeypatch.delenv(log.LAUNCHER, raising=False)
    for say in (log.say, log.error):
        say("é🔥 a\nb\r\x1b[31m\x9b\u2028\u202e\udcff")
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1 and said.rstrip("\n").isprintable() and "é🔥 a" in said
        say("a\u3000b")  # a space in the name of a folder
        assert "a\u3000b" in capsys.readouterr().err
