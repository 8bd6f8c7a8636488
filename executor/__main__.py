"""`python -m executor` is `harmony-executor`."""

from __future__ import annotations

import sys

from executor.cli import main

if __name__ == "__main__":
    sys.exit(main())
