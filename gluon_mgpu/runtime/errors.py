"""Errors for the user: one line that says what is wrong, the value, and what to do."""


class Error(Exception):
    """The run failed. The message is the line that the user sees."""

    exit_status = 1


class UsageError(Error):
    """The command was wrong: an option, or a value that this machine or data set does not support."""

    exit_status = 2


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C, once the current step is complete and the checkpoint is saved. The message is one line."""
