"""``python -m forksync``."""

import sys

from forksync.cli import main

sys.exit(main())
