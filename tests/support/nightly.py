"""Whether the exhaustive tests run: `make test-all` sets the variable."""

import os

NIGHTLY = os.environ.get("RAGKV_NIGHTLY") == "1"
