"""Storing what a question had to make anew, where the index may be written."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ragkv.errors import RetrievalError, StoreError
from ragkv.store import Store

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)


class Keeper:
    """Stores what a question had to make; an index that cannot be written still answers, and says so once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._told = False

    def keep(self, write: Callable[[], object]) -> None:
        """Run `write`, unless the store is read-only; a failed write is logged, because the answer does not need it."""
        if self._store.readonly:
            if not self._told:
                logger.warning(
                    "%s is open read-only: what questions have to make anew is not kept", self._store.directory.parent
                )
            self._told = True
            return
        try:
            write()
        except (StoreError, RetrievalError) as error:
            logger.warning("what a question made anew is not kept: %s", error)
