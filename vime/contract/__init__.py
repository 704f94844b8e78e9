"""``vime contract``: a function of the user's, tried with small inputs, before a run."""
