"""The kinds of rules of a translation table."""
