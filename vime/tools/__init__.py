"""Tools that generate functions call. Built-in ones and the user's own run in worker processes (``vime.workers``)."""


class ToolError(Exception):
    """A tool cannot be loaded, or failed on one call; the message names it and the cause."""
