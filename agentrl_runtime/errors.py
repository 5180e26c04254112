"""Errors meant for the person who runs the command."""


class AgentRLError(Exception):
    """What went wrong, naming the thing and where it is, and how to mend it.

    The command line prints it as one line followed by the mend, and exits with 1.
    """

    def __init__(self, what: str, *, mend: str = "") -> None:
        self.what = what
        self.mend = mend
        super().__init__(f"{what}\n  mend: {mend}" if mend else what)
