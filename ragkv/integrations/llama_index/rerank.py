"""`RagKVRerank`: a cross-encoder as a LlamaIndex node post-processor that keeps the scores of earlier stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_index.core.instrumentation as instrument
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.callbacks.schema import CBEventType, EventPayload
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from ragkv.errors import UsageError
from ragkv.integrations.llama_index.argument import refuse_unknown
from ragkv.integrations.llama_index.node import FUSED, RERANK, RETRIEVAL, fused, node_text, with_scores
from ragkv.retrievers import Reranker, ScoreKind, fuse, load_reranker, normalise_rerank

__all__ = ["RagKVRerank"]

dispatcher = instrument.get_dispatcher(__name__)


class RagKVRerank(BaseNodePostprocessor):
    """Scores nodes against the question, fuses the score with that of retrieval (PCED Eqs. 4-7), and sorts by it.

    `reranker` is a `ragkv.retrievers.Reranker` or a name ("mini", "BAAI/bge-reranker-v2-m3"). `top_n` None keeps all
    nodes. `score_kind` is the scale of scores from retrievers other than ragkv's. It returns copies of the nodes, with
    `retrieval_score`, `rerank_score` and `fused_score` in their metadata.
    """

    model_name: str = Field(description="The reranker's name.")
    top_n: int | None = Field(default=None, description="How many nodes to keep; None keeps all.")
    score_kind: ScoreKind = Field(default="dense", description="The scale of foreign retrieval scores.")
    _reranker: Reranker = PrivateAttr()
    _made: dict[str, Any] = PrivateAttr()

    def __init__(
        self,
        reranker: Reranker | str = "mini",
        *,
        top_n: int | None = None,
        score_kind: ScoreKind = "dense",
        device: str | None = None,
        max_tokens: int | None = None,
        callback_manager: CallbackManager | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        if top_n is not None and top_n < 1:
            raise UsageError(f"top_n must be at least 1, or None for all nodes, not {top_n}.")
        loaded = reranker
        if isinstance(loaded, str):
            from ragkv.model.language import pick_device

            loaded = load_reranker(loaded, device=str(pick_device(device)), max_tokens=max_tokens)
        options: dict[str, Any] = {"model_name": loaded.name, "top_n": top_n, "score_kind": score_kind}
        if callback_manager is not None:
            options["callback_manager"] = callback_manager
        super().__init__(**options)
        self._reranker = loaded
        self._made = {"reranker": reranker, "device": device, "max_tokens": max_tokens}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **options: Any) -> RagKVRerank:
        """Make one from the result of `to_dict`; the reranker is loaded again by its name."""
        kept = {key: data[key] for key in ("top_n", "score_kind") if key in data}
        return cls(data["model_name"], **(kept | options))

    def __getstate__(self) -> dict[str, Any]:
        """A reranker that was given by name is loaded again; one that was given as an object is pickled."""
        return self._made | {"top_n": self.top_n, "score_kind": self.score_kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @classmethod
    def class_name(cls) -> str:
        return "RagKVRerank"

    def _postprocess_nodes(
        self, nodes: Sequence[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise UsageError("RagKVRerank needs the question: call postprocess_nodes(nodes, query_str=...).")
        given = list(nodes)
        if not given:
            return []
        top_n = min(self.top_n or len(given), len(given))
        dispatcher.event(ReRankStartEvent(query=query_bundle, nodes=given, top_n=top_n, model_name=self._reranker.name))
        payload: dict[str, Any] = {
            EventPayload.NODES: given,
            EventPayload.MODEL_NAME: self._reranker.name,
            EventPayload.QUERY_STR: query_bundle.query_str,
            EventPayload.TOP_K: top_n,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            logits = self._reranker.score(query_bundle.query_str, [node_text(node.node) for node in given])
            scored = [self._scored(node, logit) for node, logit in zip(given, logits, strict=True)]
            scored.sort(key=lambda node: (-node.get_score(), node.node_id))
            event.on_end(payload={EventPayload.NODES: scored[:top_n]})
        dispatcher.event(ReRankEndEvent(nodes=scored[:top_n]))
        return scored[:top_n]

    def _scored(self, node: NodeWithScore, logit: float) -> NodeWithScore:
        """A copy with the new scores. If the node was reranked before, its earlier fused score is fused again."""
        score = fuse(fused(node, self.score_kind), normalise_rerank(logit))
        stages = {RETRIEVAL: node.metadata.get(RETRIEVAL, node.score), RERANK: logit, FUSED: score}
        return with_scores(node, stages, score)
