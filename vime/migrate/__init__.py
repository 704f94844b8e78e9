"""From a launch script of slime or vime (the fork of it) to a configuration of ours."""
