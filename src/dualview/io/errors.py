"""The one exception that is the user's business."""


class UserError(Exception):
    """A mistake the user can mend, in one sentence that names what is wrong and what to do.

    The command line prints the sentence alone and leaves with exit code 2.
    """
