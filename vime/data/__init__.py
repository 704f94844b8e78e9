"""Where prompts come from and which comes next."""


class DataError(Exception):
    """The data cannot be used; the message names the source, the place and the fix."""
