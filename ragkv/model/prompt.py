"""The prompt's parts: prefix | contexts | suffix, cut out of the model's own chat template.

The template is rendered once around two sentinels. Parts are tokenised separately and every engine uses the same
parts, so engines differ in attention only. What users and documents write never becomes a control token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ragkv.config import PromptConfig
from ragkv.errors import ConfigError
from ragkv.model.control import ControlTokens, readable

__all__ = ["Prompt", "Tokens", "closing", "render"]

_CONTEXTS = "\u27e6ragkv:contexts\u27e7"
_QUESTION = "\u27e6ragkv:question\u27e7"


class Tokens:
    """A transformers tokenizer behind one lock (fast tokenizers keep per-call options as state).

    Raises UnsupportedModelError for a tokenizer that cannot keep control tokens out of text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        with self._lock:
            probe = tokenizer("a")["input_ids"]
        self.bos_token_id: int | None = tokenizer.bos_token_id
        bos = self.bos_token_id
        self.bos_id: int | None = bos if bos is not None and probe[:1] == [bos] else None
        """The BOS, where the tokenizer puts one before every text."""
        self.eos_id: int | None = tokenizer.eos_token_id
        self.byte_ids = _byte_ids(tokenizer)
        self._control = ControlTokens(tokenizer, byte_ids=self.byte_ids)

    def encode(self, text: str, *, control: bool = False) -> tuple[int, ...]:
        """Ids of `text`, no BOS or EOS added; with `control` the names of control tokens in it become these.

        `control` is for the template's own text alone. Else no control token comes out, whatever the text says.
        """
        text = readable(text)
        with self._lock:
            # verbose: a whole document is counted before it is cut, which is no reason to warn about its length
            ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=not control, verbose=False)[
                "input_ids"
            ]
            if not control and not self._control.suspect.isdisjoint(ids):
                ids = self._control.plain(text)
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, control tokens left out."""
        with self._lock:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: list[dict[str, str]], *, header: bool = True) -> str | None:
        """The chat template's text, with the assistant's `header` at its end; None when the model has no template.

        `enable_thinking` keeps hybrid models (Qwen3, SmolLM3) from answering with a train of thought; templates
        that do not know it ignore it.
        """
        with self._lock:
            if not getattr(self._tokenizer, "chat_template", None):
                return None
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=header, enable_thinking=False
            )
        return text


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that stand for one byte each (`<0xE4>`) in a SentencePiece vocabulary; none in a byte-level one."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = tokenizer.convert_tokens_to_ids(names)
    known = [(i, name) for i, name in zip(ids, names, strict=True) if i is not None]  # an unknown one may be <unk>'s id
    back = tokenizer.convert_ids_to_tokens([i for i, _ in known])
    return frozenset(i for (i, name), token in zip(known, back, strict=True) if token == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The fixed text around contexts and question; `prefix_newlines` newline tokens end the prefix.

    It is kept in the index: templates may print today's date, and a prefix that changed overnight would make a miss
    of every `prefixed` chunk KV.
    """

    prefix: str
    before_question: str
    after_question: str
    separator: str
    prefix_newlines: int = 0
    bos: Literal["auto", "none"] = "auto"

    def facts(self) -> dict[str, Any]:
        """All that it says, for identities and for the index; as `PromptConfig.facts`."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("bos", "auto")}

    @property
    def before_contexts(self) -> str:
        """The prefix with its newlines, as text."""
        return self.prefix + "\n" * self.prefix_newlines

    def prefix_ids(self, tokens: Tokens) -> tuple[int, ...]:
        """Ids before every context, with exactly one BOS where the model wants one, or with none (`bos`).

        The newlines are counted in tokens, as APE searches their number: as text, tokenizers would join them.
        """
        ids = self._template_ids(tokens, self.prefix)
        if self.bos == "none" and ids[:1] == (tokens.bos_token_id,) and self._only(ids, tokens):
            ids = ids[1:]
        if self.prefix_newlines:  # a tokenizer that marks the start of a text puts that mark first
            ids += tokens.encode("\n")[-1:] * self.prefix_newlines
        if self.bos == "auto" and tokens.bos_id is not None and ids[:1] != (tokens.bos_id,):
            ids = (tokens.bos_id, *ids)
        return ids

    def chunk_ids(self, tokens: Tokens, text: str) -> tuple[int, ...]:
        """Ids of a chunk as it stands in the prompt."""
        return tokens.encode(text + self.separator)

    def suffix_ids(self, tokens: Tokens, question: str) -> tuple[int, ...]:
        """Ids of the question and of the assistant's header, up to the first generated token."""
        return tokens.encode(self.before_question + question) + self._template_ids(tokens, self.after_question)

    def _template_ids(self, tokens: Tokens, text: str) -> tuple[int, ...]:
        """Ids of the template's own text; without the BOS of a tokenizer that has one, where `bos` wants none."""
        ids = tokens.encode(text, control=True)
        if self.bos == "auto" or tokens.bos_id is None or tokens.bos_id == tokens.eos_id:
            return ids
        return tuple(i for i in ids if i != tokens.bos_id)

    def _only(self, ids: tuple[int, ...], tokens: Tokens) -> bool:
        """Whether the first of `ids` is a BOS, and no marker of turns that happens to be called so (SmolLM2)."""
        return tokens.bos_id is not None or ids[0] not in ids[1:] + tokens.encode(self.after_question, control=True)


def render(config: PromptConfig, tokens: Tokens) -> Prompt:
    """Cut the model's chat template into its parts; a model without one gets plain text (base models)."""
    lead, _, trail = config.question.partition("{question}")
    user = config.context + _CONTEXTS + _QUESTION + trail
    text = _templated(config.system, user, tokens)
    if text is None:
        text = f"{config.system}\n\n{user}\nAnswer:" if config.system else f"{user}\nAnswer:"
    if text.count(_CONTEXTS) != 1 or text.count(_QUESTION) != 1:
        raise ConfigError("This model's chat template repeats or drops the user's message; ragkv cannot split it.")
    prefix, rest = text.split(_CONTEXTS)
    between, after = rest.split(_QUESTION)
    return Prompt(
        prefix=prefix,
        before_question=between + lead,
        after_question=after,
        separator=config.separator,
        prefix_newlines=config.prefix_newlines,
        bos=config.bos,
    )


def closing(tokens: Tokens) -> tuple[str, str]:
    """The template's text between the assistant's header and its words, and after them: what fine-tuning teaches.

    A model without a template gets a space after "Answer:" and nothing behind.
    """
    asked = [{"role": "user", "content": _QUESTION}]
    header = tokens.render(asked)
    if header is None:
        return " ", ""
    whole = tokens.render([*asked, {"role": "assistant", "content": _CONTEXTS}], header=False) or ""
    before, found, after = whole.partition(_CONTEXTS)
    if not found:
        raise ConfigError("This model's chat template drops the assistant's message; ragkv cannot learn its end.")
    # a template may write the header otherwise when the answer is known (a train of thought): then nothing is between
    return (before.removeprefix(header) if before.startswith(header) else ""), after


def _templated(system: str, user: str, tokens: Tokens) -> str | None:
    """The rendered template; the system text joins the user's message where the template has no system role."""
    from jinja2.exceptions import TemplateError

    folded = [{"role": "user", "content": f"{system}\n\n{user}"}]
    try:
        text = tokens.render([{"role": "system", "content": system}, {"role": "user", "content": user}])
    except TemplateError:  # Gemma 2 and Mistral v0.1 raise on a system message
        return tokens.render(folded)
    if text is not None and system.strip() not in text:
        return tokens.render(folded)
    return text
