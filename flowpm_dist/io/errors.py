"""The two kinds of errors that a command reports without a traceback."""


class UserError(ValueError):
    """A mistake that the user can correct, such as a wrong run file; exit status 2.

    Commands find these mistakes before the work begins.
    """


class WorkError(RuntimeError):
    """The work cannot continue, for example on a full disk or a damaged file; exit status 1.

    A single rank may raise it.
    """
