"""The one exception that is the user's business."""


class UserError(Exception):
    """A mistake the user can mend, in one sentence that names what is wrong and what to do.

    The command line prints the sentence alone and leaves with exit code 2.
    """


def first_line(error: BaseException) -> str:
    """What another library said, short enough for a sentence of ours."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300].rstrip(".")
