"""`python -m kvtier`: the same as the command `kvtier`."""

from __future__ import annotations

import sys

from kvtier.cli import main

sys.exit(main())
