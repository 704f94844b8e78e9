"""Code that nobody vouches for, in a process of its own: bounded, and, under bubblewrap, without files or network."""
