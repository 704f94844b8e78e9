"""The one error of forksync whose message is for the user."""

from __future__ import annotations


class ForksyncError(Exception):
    """Something the user can put right; the message names the thing, the value and the next step."""
