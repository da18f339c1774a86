"""Whether the exhaustive tests run: `make test-all` sets the variable."""

from __future__ import annotations

import os

NIGHTLY = os.environ.get("RAGKV_NIGHTLY") == "1"
