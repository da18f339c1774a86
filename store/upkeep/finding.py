"""What is wrong in a store, in words for people and in keys for `repair`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["Finding", "FindingKind"]

FindingKind: TypeAlias = Literal["damaged", "missing", "mismatch", "stray", "pages"]

REPAIR = "run `ragkv repair`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it was written.

    `damaged`: a row that cannot be read; `missing`: one that others point to; `mismatch`: two that contradict each
    other; `stray`: one that belongs to nothing; `pages`: LMDB itself cannot read a table. `where` names the row,
    `document` the document's id when it is known. `key` is the row's, `owner` the digest of the id of a chunk that
    has to do with it.
    """

    kind: FindingKind
    table: str
    where: str
    what: str
    document: str | None = None
    remedy: str = REPAIR
    key: bytes = field(default=b"", repr=False)
    owner: bytes = field(default=b"", repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "table": self.table,
            "where": self.where,
            "what": self.what,
            "document": self.document,
            "remedy": self.remedy,
        }

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"
