"""A first translation table from two trees that exist: which files belong together, what was renamed between them."""
