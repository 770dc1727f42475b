"""Errors that a user sees: one line that says what is wrong, the value, and what to do."""


class Error(Exception):
    """The run failed. The message is the line that the user reads."""

    exit_status = 1


class UsageError(Error):
    """The command was wrong: an option, or a value that this machine or data set does not support."""

    exit_status = 2


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the step in progress was completed and the checkpoint saved. The message is one line."""
