"""forksync keeps a derived code base aligned with its upstream: translate, compare, merge, measure, again."""
