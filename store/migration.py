"""What a store of an older format gets when it is first opened for writing.

`Database` makes the new tables first, empty, and then runs `migrate` in one transaction, which fills them and sets the
format. A process that is killed before the commit leaves the old format, and the next one begins anew: so every step
must clear what it fills. Processes that open the store read-only meanwhile, or afterwards without permission to write,
do without the new tables, the slower way. docs/formats.md, "Versions".
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ragkv.store.tally import is_stale, recount
from ragkv.store.transaction import Transaction

__all__ = ["FORMAT_VERSION", "migrate", "needs_migration"]

FORMAT_VERSION = 3
"""Version of the tables and their rows (docs/formats.md)."""

STEPS: dict[int, tuple[Callable[[Transaction], object], ...]] = {3: (recount,)}
"""What fills the tables of a format from those of the format before it, all in one transaction."""

logger = logging.getLogger(__name__)


def needs_migration(txn: Transaction) -> bool:
    """Whether there is anything for `migrate` to do."""
    return _version(txn) < FORMAT_VERSION or is_stale(txn)


def migrate(txn: Transaction) -> None:
    """Bring a store up to `FORMAT_VERSION`, and count anew what was damaged since it was counted.

    Another process may have done so in the meantime: then this does nothing.
    """
    version = _version(txn)
    if version < FORMAT_VERSION:
        logger.info("bringing a store of format %d up to format %d", version, FORMAT_VERSION)
        for since in range(version + 1, FORMAT_VERSION + 1):
            for step in STEPS.get(since, ()):
                step(txn)
        txn.put("meta", b"format", b"%d" % FORMAT_VERSION)
    elif is_stale(txn):
        recount(txn)


def _version(txn: Transaction) -> int:
    return int(bytes(txn.get("meta", b"format") or b"0"))
