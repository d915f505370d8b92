"""The error for an identity that an architecture has no place for."""

from dualview.io.errors import UserError


class NotApplicable(UserError):
    """This model has no place for an identity: the only reason to skip a check instead of failing it."""
