"""`Question`: one question with all of its options, as every door asks it.

The options of the command line, the fields of HTTP and MCP, the keys of question files, and the tables of the docs are
made from its fields (`question_options`), so a new option is one more field here, and its use in the index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Self, TypeAlias

from ragkv.config import MODES, MOST_STEPS, NONE, IndexConfig, build_config
from ragkv.decoding import DECODING_PANEL, Decoding, schema_text
from ragkv.errors import UsageError
from ragkv.types import Chunk, Document, ScoredChunk
from ragkv.util.options import UNSET, Option, OptionField, doors, options_of, require_options

_RETRIEVAL = "Retrieval"
_INDEX = "the index's"
SEARCH_OPTIONS = ("retrieval", "rerank", "candidates", "where", "search_for", "only")
"""Besides `top_k`, the options that a search without an answer has too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and its options. What is unset (None, or empty) is as in the index's `ragkv.toml`.

    UsageError for an empty question, and for a value out of its bounds.
    """

    question: str
    engine: Annotated[
        str,
        Option(
            "How the chunks are read: full, single, ippd, ape, block, blend, pced, apb, or an engine of your own.",
            unset=_INDEX,
            setting="default_engine",
            doors=doors("chat", "mcp", "file"),
        ),
    ] = UNSET
    system: Annotated[
        str,
        Option(
            "Instructions for this question; they come before it, after the documents, so stored KV still applies.",
            doors=doors("chat", "mcp"),
        ),
    ] = ""
    top_k: Annotated[
        int,
        Option(
            "How many chunks to answer from.",
            unset=_INDEX,
            least=1,
            setting="top_k",
            doors=doors("chat", "mcp", "file", "search"),
        ),
    ] = UNSET
    retrieval: Annotated[
        str,
        Option(
            "How to search: dense, sparse, colbert, hybrid or bm25.",
            unset=_INDEX,
            choices=MODES,
            panel=_RETRIEVAL,
            doors=doors("chat", "search"),
        ),
    ] = UNSET
    rerank: Annotated[
        bool,
        Option(
            "Sort the candidates with the index's reranker, or do not.",
            unset=_INDEX,
            flag="--rerank/--no-rerank",
            panel=_RETRIEVAL,
            doors=doors("chat", "search"),
        ),
    ] = UNSET
    candidates: Annotated[
        int,
        Option(
            "How many chunks the reranker reads; the best `top_k` of them remain.",
            unset=_INDEX,
            least=1,
            panel=_RETRIEVAL,
            doors=doors("chat", "search"),
        ),
    ] = UNSET
    where: Annotated[
        tuple[str, ...],
        Option(
            "Only documents that match FIELD=PATTERN, such as source=notes/*.md.",
            metavar="FIELD=PATTERN",
            doors=doors("chat", "mcp", "file", "search"),
        ),
    ] = ()
    steps: Annotated[
        int,
        Option(
            "Search up to this many times: for the question, then for queries that the model writes.",
            unset="the index's, or 1",
            least=1,
            most=MOST_STEPS,
            panel=_RETRIEVAL,
            doors=doors("chat", "mcp", "file"),
        ),
    ] = UNSET
    """With `chunks` the default is 1."""
    max_new_tokens: Annotated[
        int,
        Option("Most tokens of an answer.", least=1, panel=DECODING_PANEL, doors=doors("chat", "mcp", "file", "ranks")),
    ] = 128
    decoding: Decoding | Mapping[str, Any] = UNSET
    """A `Decoding`, or the settings that differ from the index's `[decoding]` table: `{"temperature": 0.7}`."""
    schema: Any = None
    """The answer's JSON schema: a mapping, JSON text, or a class of pydantic; the same as `schema` in `decoding`, which
    also has `regex` and `grammar`."""
    logits_processors: Sequence[Any] = ()
    """transformers' logits processors, which get the generated tokens; do not share stateful ones between requests."""
    stopping_criteria: Sequence[Any] = ()
    chunks: Sequence[ScoredChunk] | None = None
    """Chunks to answer from instead of the first search, best first; they need not be from the index."""
    keep: bool = False
    """Store the KV of `chunks` that are not from the index, until the next `gc`."""
    tail: Sequence[tuple[str, bool]] | None = None
    """The prompt after the documents (`ragkv.model.tools.tool_tail`) in place of the question; the answer then includes
    the names of the control tokens that `grammar` allows. With `chunks` empty it is the whole prompt: the model is
    asked alone."""
    prompt_ids: Sequence[int] = ()
    """The tokens of the whole prompt, in place of `tail`, for the model alone."""
    search_for: str | Sequence[str] = ()
    """The search query in place of the question, since a follow-up question may not name its subject. Of several, the
    first matters most, and the results are interleaved."""
    message: str | None = None
    """What the user wrote, if `question` also holds earlier turns or instructions; for `ragkv.index.intent`."""
    only: Callable[[Document, Chunk], bool] | None = None
    """Whether a chunk of a document may be found. Like `where`, it applies before the best are selected."""
    rewrite: str | None = None
    """A prompt to the model before the search (`Conversation.rewrite_text`); its answer replaces `search_for`."""

    @property
    def searches(self) -> Sequence[str]:
        """The search queries."""
        return (self.search_for,) if isinstance(self.search_for, str) else self.search_for or (self.question,)

    def __post_init__(self) -> None:
        for name in ("question", "system"):
            text = getattr(self, name) or ""
            if not isinstance(text, str):
                raise UsageError(f"The {name} must be a text, not {text!r}.", param=name)
            if any("\ud800" <= char <= "\udfff" for char in text):  # surrogates come from bytes that are not UTF-8
                raise UsageError(f"The {name} is not valid Unicode text; write it in UTF-8.", param=name)
            object.__setattr__(self, name, text.strip())
        if not self.question:
            raise UsageError("The question is empty; ask something.", param="question")
        where: str | Sequence[str] | None = self.where
        where = (where,) if isinstance(where, str) else tuple(where or ())
        object.__setattr__(self, "where", where)
        require_options(self)

    @classmethod
    def of(cls, asked: Asked, **common: Any) -> Question:
        """A question from its text, or from a mapping with its own options; these override the common ones.

        A `Question` is complete: it does not take common options.
        """
        if isinstance(asked, Question):
            return asked
        options = common | ({"question": asked} if isinstance(asked, str) else dict(asked))
        if not isinstance(options.get("question"), str):
            raise UsageError('A question is a text, or options with its text as "question".')
        known = {each.name for each in fields(cls)}
        if unknown := sorted(options.keys() - known):
            raise UsageError(f"A question has no option {unknown[0]!r}; there are {', '.join(sorted(known))}.")
        return cls(**options)

    def completed(self, config: IndexConfig) -> Self:
        """With the index's settings for all that is unset, but for the decoding (`decoding_settings`)."""
        steps = config.steps.count if self.chunks is None else 1
        return replace(
            self,
            engine=self.engine or config.default_engine,
            top_k=self.top_k or config.top_k,
            retrieval=self.retrieval or config.retrieval,
            rerank=config.rerank and config.reranker != NONE if self.rerank is None else self.rerank,
            candidates=self.candidates or config.candidates,
            steps=self.steps or steps,
        )

    def decoding_settings(self, config: IndexConfig) -> Decoding:
        """The index's `[decoding]`, changed by the question's; ConfigError for a value that is none."""
        if isinstance(self.decoding, Decoding):
            settings = self.decoding
            return (settings if self.schema is None else replace(settings, schema=schema_text(self.schema))).settled()
        changes = dict(self.decoding or {}) | ({} if self.schema is None else {"schema": self.schema})
        if changes.get("schema") is not None:
            changes["schema"] = schema_text(changes["schema"])
        merged: Decoding = build_config(Decoding, asdict(config.decoding) | changes, "decoding")
        return merged.settled()


Asked: TypeAlias = str | Question | Mapping[str, Any]
"""A question as `RagKV` takes it: its text, or with its own options."""


def text_of(asked: Asked) -> str:
    """The text of a question that may be invalid."""
    if isinstance(asked, Question):
        return asked.question
    return asked if isinstance(asked, str) else str(asked.get("question", ""))


@cache
def question_options() -> Mapping[str, OptionField]:
    """Every option of a question, those of `Decoding` included, in the order of the help."""
    return {**options_of(Question), **options_of(Decoding)}


def question_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Question`, from options by name; what is None is left out."""
    settings = options_of(Decoding)
    chosen = {name: value for name, value in options.items() if value is not None}
    decoding = {name: chosen.pop(name) for name in settings if name in chosen}
    return {**chosen, **({"decoding": decoding} if decoding else {})}
