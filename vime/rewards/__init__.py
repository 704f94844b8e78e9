"""What a response is worth. Built-in functions and the user's own run in worker processes (``vime.workers``)."""


class RewardError(Exception):
    """A reward cannot be loaded, or failed on one response; the message names it, the task and the cause."""
