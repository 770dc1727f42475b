"""What is printed on standard error: one line, whatever is in it."""

from gluon_mgpu.runtime import log


def test_a_message_is_one_line_without_control_characters(capsys, monkeypatch):
    monkeypatch.delenv(log.LAUNCHER, raising=False)
    for say in (log.say, log.error):
        say("é🔥 a\nb\r\x1b[31m\x9b\u2028\u202e\udcff")
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1 and said.rstrip("\n").isprintable() and "é🔥 a" in said
        say("a\u3000b")  # a space in the name of a folder
        assert "a\u3000b" in capsys.readouterr().err
