"""What a name of the hub stands for when a sweep is planned; None where only loading can tell."""

from __future__ import annotations

from dualview.io import hub
from dualview.io.errors import UserError
from dualview.io.hub import HubName, Kind


def commit_of(name: HubName, kind: Kind) -> str | None:
    """The commit that loading `name` would read: the hub's, or the cached one; None where neither is known."""
    try:
        return hub.resolve(name, kind).commit
    except UserError:  # no network, no such name, no right to read it: loading will say which
        return None
