"""Functions written for slime, or for vime (the fork of it), as they are: what they are given, and how each is called."""
