"""A finding of `verify`: what is wrong, in words for people and in keys for `repair`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

__all__ = ["Finding", "FindingKind"]

FindingKind: TypeAlias = Literal["damaged", "missing", "mismatch", "stray", "pages"]

REPAIR = "run `ragkv repair`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it was written.

    `damaged`: a row cannot be read; `missing`: other rows point to a row that is not there; `mismatch`: two rows
    contradict each other; `stray`: a row belongs to nothing; `pages`: LMDB itself cannot read a table. `where` names
    the row, `document` the id of its document when that is known. `key` is the row's key, `owner` the digest of the id
    of a chunk that has to do with it.
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
        return {name: getattr(self, name) for name in ("kind", "table", "where", "what", "document", "remedy")}

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"
