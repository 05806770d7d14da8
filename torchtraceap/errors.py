"""The one exception that the command turns into a line on stderr and exit code 2."""


class UserError(Exception):
    """Bad input or an unmet precondition: says what, where, and what is possible.

    Raised for everything a user can mend. Anything else that escapes is a bug and keeps its traceback.
    """
