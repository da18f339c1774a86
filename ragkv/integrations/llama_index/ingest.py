"""`RagKVIngest`: the step of an `IngestionPipeline` that prefills nodes once and stores their KV."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent

from ragkv.errors import UsageError
from ragkv.ingest import IngestReport
from ragkv.integrations.llama_index.argument import refuse_unknown
from ragkv.integrations.llama_index.bundle import bundle
from ragkv.integrations.llama_index.node import node_text
from ragkv.pipeline import RagKV

__all__ = ["RagKVIngest"]


class RagKVIngest(TransformComponent):
    """Stores text, chunk and KV of every node under the node's own id, and returns the nodes unchanged.

    All nodes of one source (`ref_doc_id`, or the node's own id) form one document and replace its earlier version, so
    pass them in one call. A document whose nodes did not change is skipped; of one that changed, only new text is
    encoded. Blank nodes are not stored. `report` says what the last call did.

    Pass a `RagKV`, or the folder of an index, which is opened when it is first needed. With
    `IngestionPipeline.run(num_workers=...)`, each worker process opens the index and loads the model.
    """

    index: str = Field(description="The index's folder.")
    device: str | None = Field(default=None, description="Where the model runs.")
    _rag: RagKV | None = PrivateAttr(default=None)
    _report: IngestReport | None = PrivateAttr(default=None)

    def __init__(
        self, rag: RagKV | None = None, *, index: str | Path | None = None, device: str | None = None, **unknown: Any
    ) -> None:
        refuse_unknown(type(self), unknown)
        if (rag is None) == (index is None):
            raise UsageError("RagKVIngest takes either a RagKV or the folder of an index.")
        options: dict[str, Any] = {"index": str(index if rag is None else rag.folder), "device": device}
        super().__init__(**options)
        self._rag = rag

    @classmethod
    def class_name(cls) -> str:
        return "RagKVIngest"

    @property
    def rag(self) -> RagKV:
        if self._rag is None:
            self._rag = RagKV.open(self.index, device=self.device)
        return self._rag

    @property
    def report(self) -> IngestReport:
        """The `ragkv.ingest.IngestReport` of the last call. Raises ValueError before the first call.

        `added`, `updated` and `unchanged` are lists of document ids; `kv_encoded` and `kv_reused` count chunk KVs.
        """
        if self._report is None:
            raise ValueError("nothing has been ingested yet")
        return self._report

    def __call__(self, nodes: Sequence[BaseNode], **_: Any) -> Sequence[BaseNode]:
        groups: dict[str, list[BaseNode]] = {}
        for node in nodes:
            if node_text(node).strip():
                groups.setdefault(node.ref_doc_id or node.node_id, []).append(node)
        self._report = self.rag.add_chunks([bundle(document_id, group) for document_id, group in groups.items()])
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **options: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self.__call__, nodes, **options)

    def delete(self, ref_doc_id: str) -> bool:
        """Delete the nodes of a source with their KV; False if there are none."""
        return self.rag.delete(ref_doc_id)

    def to_dict(self, **options: Any) -> dict[str, Any]:
        """Add the store's generation, so that a pipeline's cache does not skip what was deleted from the index."""
        state: dict[str, Any] = super().to_dict(**options)
        return state | {"generation": self.rag.store.generation}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **options: Any) -> RagKVIngest:
        kept = {key: value for key, value in data.items() if key in ("index", "device")}
        return cls(**kept, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {"index": str(Path(self.index).absolute()), "device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(index=state["index"], device=state["device"])  # type: ignore[misc]
