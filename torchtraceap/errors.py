"""Exceptions that the command turns into a line on stderr: bad input, and a request to end."""


class UserError(Exception):
    """Bad input or an unmet precondition: says what, where, and what is possible.

    Raised for everything a user can mend. Anything else that escapes is a bug and keeps its traceback.
    """


class Terminated(KeyboardInterrupt):
    """SIGTERM asked this process to end; what ends in order on Ctrl-C does so here too."""
