"""The indexes that a server answers from: each has a name, and clients ask for it as a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ragkv.engines import engine_names
from ragkv.server.failure import Refusal

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

__all__ = ["OWNER", "Chosen", "Served"]

OWNER = "ragkv"


class Chosen(NamedTuple):
    """What a model id stands for: an index, and the engine if the id names one."""

    name: str
    rag: RagKV
    engine: str | None


class Served:
    """Open indexes by name. The model id of one is `ragkv/NAME`, or `ragkv/NAME:ENGINE`; `NAME` alone does as well."""

    def __init__(self, indexes: Mapping[str, RagKV]) -> None:
        self._indexes = dict(indexes)

    def __iter__(self) -> Iterator[tuple[str, RagKV]]:
        return iter(self._indexes.items())

    def model_ids(self) -> list[str]:
        """All that a client may ask for: each index, and each index with each engine."""
        return [
            identifier
            for name in self._indexes
            for identifier in (f"{OWNER}/{name}", *(f"{OWNER}/{name}:{engine}" for engine in engine_names()))
        ]

    def chosen(self, model: str) -> Chosen:
        """The index and engine that a model id names; Refusal 404 when it names none of them."""
        name, colon, engine = model.removeprefix(f"{OWNER}/").partition(":")
        rag = self._indexes.get(name)
        if rag is None or (colon and engine not in engine_names()):
            known = ", ".join(f"{OWNER}/{name}" for name in self._indexes)
            message = f"There is no model {model!r}; there are {known}, each also with an engine, as in NAME:ape."
            raise Refusal(404, message, param="model", code="model_not_found")
        return Chosen(name, rag, engine or None)

    def index(self, name: str) -> RagKV:
        """The index of this name; Refusal 404 when there is none."""
        if name not in self._indexes:
            message = f"There is no index {name!r}; there are {', '.join(self._indexes)}."
            raise Refusal(404, message, param="name", code="not_found")
        return self._indexes[name]

    def close(self) -> None:
        """Close every index; running answers end."""
        for rag in self._indexes.values():
            rag.close()
