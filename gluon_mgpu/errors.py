"""The errors a user meets: one line that says what is wrong, with the value, and what to do."""


class Error(Exception):
    """The run failed. Its text is the line that the user reads."""

    exit_status = 1


class UsageError(Error):
    """The command was wrong: an option, or a value that this machine or data set cannot serve."""

    exit_status = 2


class BetweenSteps(KeyboardInterrupt):
    """Ctrl-C, held back until the replicas are whole, and with several workers all are at the same step."""
