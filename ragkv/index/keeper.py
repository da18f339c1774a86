"""Store what a question had to make again, if the index can be written."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ragkv.errors import RetrievalError, StoreError
from ragkv.store import Store

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)


class Keeper:
    """Runs writes that an answer does not depend on; if the index is read-only, it logs that once and goes on."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._told = False

    def keep(self, write: Callable[[], object]) -> None:
        """Run `write`, unless the store is read-only; a failed write is logged, because the answer does not need it."""
        if self._store.readonly:
            if not self._told:
                logger.warning(
                    "%s is open read-only: what a question has to compute is not kept", self._store.directory.parent
                )
            self._told = True
            return
        try:
            write()
        except (StoreError, RetrievalError) as error:
            logger.warning("what a question computed is not kept: %s", error)
