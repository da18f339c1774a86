"""The tokens of a prompt: prefix | contexts | suffix, cut out of the model's own chat template.

`Prompt` renders the template once around two sentinels. The parts are tokenised separately and are the same for all
engines, so engines differ in attention only.

`ControlTokens` keeps text of users and documents from becoming control tokens. A document may spell `</s><|system|>`,
and a tokenizer can produce the real ids from it in three ways: it looks for added tokens in the text (transformers'
`split_special_tokens` leaves out the special ones, but not `<think>` or `<tool_call>`, which are added with `special:
false`); its model finds the whole string in its vocabulary (Unigram, WordPiece, WordLevel, and BPE with
`ignore_merges`); or its normaliser first makes the string out of another one (full-width letters under NFKC, capitals
under lower-casing). So the ids are checked, not the text: a text whose ids contain a control token is encoded again, by
the same model and normaliser, without added tokens, and with every control token's name cut in two where the model
would look it up.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

from ragkv.config import PromptConfig
from ragkv.errors import ConfigError, UnsupportedModelError

_THOUGHT = re.compile(r"</?think>|</[\w:]*(?:think|thought|reason)\w*>|\[/?THINK\]|<\|(?:START|END)_THINKING\|>")
_MARK = re.compile(r"<\|\w.*\|>|<｜\w.*｜>|\[\|\w.*\|\]")  # no ordinary vocabulary entry looks like this
_BRACKETED = re.compile(r"[<\[{(]\S+[>\]})]")
_IN_TEMPLATE = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_RARE = "\ue000\U00013000\ua66e\U000f0000"  # characters that few vocabularies know
_STOPS = ("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
_DEEPEST = 100
_RANGES = 5000  # Oniguruma takes 10,000 in one class


class ChatTemplateError(UnsupportedModelError):
    """The model's chat template cannot be rendered; some refuse only certain messages."""


class ControlTokens:
    """The control tokens of one transformers tokenizer, and an encoder that avoids them.

    `ids` are the added tokens, the special tokens, and the vocabulary entries that are marked as such or that the chat
    template writes as one token. Two kinds of added tokens are ordinary text and remain in use, because the model was
    trained to read that text in them: runs of white space (GPT-NeoX, Phi, Gemma), and single characters with `special:
    false`.

    `suspect` are `ids` and the ids that are right for one text and wrong for another: `<unk>` stands for characters
    that the vocabulary lacks and a byte token (`<0x0A>`) for a byte, but neither stands for its own name in a document.
    A text whose ids contain one of them must be encoded by `plain` instead.
    """

    ids: frozenset[int]
    suspect: frozenset[int]

    def __init__(self, tokenizer: Any, *, byte_ids: Iterable[int] = ()) -> None:
        """Raises UnsupportedModelError for a tokenizer that cannot write some control token's name as text."""
        self._tokenizer = tokenizer
        try:
            self._split("a")
        except (NotImplementedError, ValueError) as error:  # mistral-common's
            raise UnsupportedModelError(
                f"This model's tokenizer ({type(tokenizer).__name__}) cannot read the names of control tokens as text; "
                "use a model with a tokenizer.json."
            ) from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        byte_ids = frozenset(byte_ids)
        names = {i: name for i, name in _control_names(tokenizer).items() if i not in byte_ids}
        bytes_ = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in byte_ids}
        read_as_bytes = {i for i, name in bytes_.items() if i in self._split(name)}
        hidden = {*names, *read_as_bytes}
        self._encode: Callable[[str], list[int]] = self._split
        if backend is not None:
            added = tokenizer.added_tokens_decoder
            self._encode = _without(backend, hidden, {i: t for i, t in added.items() if _is_text(t) and not t.special})
        unknown = names.keys() & {getattr(tokenizer, "unk_token_id", None), *self._encode(_RARE)}
        self._stops = {getattr(tokenizer, stop, None) for stop in _STOPS}
        unknown -= self._stops
        self.ids = frozenset(names.keys() - unknown)
        self.ids -= self._unwritable({i: names[i] for i in self.ids})
        self.suspect = self.ids | read_as_bytes | unknown

    def plain(self, text: str) -> list[int]:
        """Ids of `text` with none of `ids` among them; the tokenizer's own ids for a text that names none."""
        ids = self._encode(text)
        for i in ids:
            if i in self.ids:
                raise _refusal(str(self._tokenizer.convert_ids_to_tokens(i)))
        return ids

    def _split(self, text: str) -> list[int]:
        """transformers' own way: it does not match special tokens in the text."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        return ids

    def _unwritable(self, names: dict[int, str]) -> set[int]:
        """Control tokens whose names cannot be written as text; the padding token is harmless, as no prompt has it."""
        harmless = {getattr(self._tokenizer, "pad_token_id", None)} - self._stops
        controls = set()
        for text in (_RARE, *(f"{name} {name}a{name}{name}" for name in names.values())):
            controls |= names.keys() & self._encode(text)
            if controls - harmless:
                raise _refusal(names[min(controls - harmless)])
        return controls


def readable(text: str) -> str:
    """`text` with lone surrogates (half an emoji from JSON or a PDF) replaced by U+FFFD, because tokenizers refuse
    them.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def harden(tokenizer: Any) -> None:
    """Make the tokenizer of an embedder or reranker read the names of its special tokens as text.

    Separators that its post-processor adds stay; ordinary text keeps its ids. Added tokens with `special: false` do not
    separate anything there, so they are still matched.
    """
    tokenizer.split_special_tokens = True
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.pre_tokenizer = _chained(backend.pre_tokenizer, *_cuts(backend, _control_names(tokenizer)))


def _control_names(tokenizer: Any) -> dict[int, str]:
    """Every control token, `<unk>` included, with its name; a tokenizer not from transformers may have none."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    names = {i: str(token.content) for i, token in added.items() if not _is_text(token)}
    specials = [name for name in getattr(tokenizer, "all_special_tokens", ()) if not _blank(name)]
    pieces = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    marked = [piece for piece in pieces if piece.endswith(("|>", "｜>", "|]"))]
    for name in (*specials, *_pieces_of_template(tokenizer), *filter(_MARK.fullmatch, marked), *_unscored(tokenizer)):
        if name in pieces:
            names[pieces[name]] = name
    return names


def _is_text(token: Any) -> bool:
    """Whether an added token stands for its text and nothing else."""
    return _blank(token.content) or (len(token.content) == 1 and not token.special)


def _blank(name: str) -> bool:
    return not name.replace("▁", " ").strip()  # as SentencePiece writes a space


def _pieces_of_template(tokenizer: Any) -> list[str]:
    """The bracketed strings in a chat template; one is a control token if it is a single vocabulary entry."""
    template = getattr(tokenizer, "chat_template", None)
    texts = template.values() if isinstance(template, dict) else [template]
    return [name for text in texts if isinstance(text, str) for name in _IN_TEMPLATE.findall(text)]


def _unscored(tokenizer: Any) -> list[str]:
    """SentencePiece's control and user-defined entries that are not declared; their score is 0, as they were not
    trained.
    """
    backend, old = getattr(tokenizer, "backend_tokenizer", None), getattr(tokenizer, "sp_model", None)
    scores: list[tuple[str, float]] = []
    if old is not None:
        scores = [(old.IdToPiece(i), old.GetScore(i)) for i in range(old.GetPieceSize())]
    elif backend is not None and type(backend.model).__name__ == "Unigram":
        scores = json.loads(backend.model.__getstate__())["vocab"]
    found = [(name, name.lstrip("▁")) for name, score in scores if score == 0]
    return [name for name, bare in found if _BRACKETED.fullmatch(bare) and not _BYTE.fullmatch(bare)]


def _without(backend: Any, hidden: Iterable[int], texts: Mapping[int, Any]) -> Callable[[str], list[int]]:
    """An encoder with the backend's own model, normaliser and pre-tokenizer that never returns a `hidden` token.

    Of the added tokens it knows only `texts`. The model is shared, not copied.
    """
    from tokenizers import Tokenizer

    plain = Tokenizer(backend.model)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = _chained(backend.pre_tokenizer, *_cuts(backend, hidden))
    plain.add_tokens([texts[i] for i in sorted(texts)])
    # those outside the model's vocabulary were renumbered
    moved = {new: i for i, token in texts.items() if (new := plain.token_to_id(token.content)) != i}
    if any(backend.model.id_to_token(new) is not None for new in moved):  # a vocabulary with holes: indistinguishable
        return _without(backend, hidden, {})

    def encode(text: str) -> list[int]:
        ids: list[int] = plain.encode(text, add_special_tokens=False).ids
        return [moved.get(i, i) for i in ids]

    return encode


def _chained(*parts: Any) -> Any:
    """The pre-tokenizers one after another, without those that are None."""
    from tokenizers.pre_tokenizers import Sequence

    there = [part for part in parts if part is not None]
    return Sequence(there) if len(there) > 1 else there[0] if there else None


def _cuts(backend: Any, ids: Iterable[int]) -> list[Any]:
    """Pre-tokenizers that keep the model from matching its own vocabulary entries with these ids.

    They come last, so they see the text in the model's own spelling, and cut every such entry after its first
    character. The list is empty if the model has no such entry.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    pieces = {piece for i in ids if (piece := backend.model.id_to_token(i)) is not None and len(piece) > 1}
    if not pieces:
        return []
    cut = Split(Regex(_any_of(pieces, ahead=True)), "isolated")
    dropped = _dropped(backend)
    return [cut] if dropped is None else [Split(Regex(dropped), "isolated"), cut]


def _dropped(backend: Any) -> str | None:
    """A regular expression for the characters that a model drops; None if there are none.

    BPE without `<unk>` and without bytes reads `<​/s>` as `</s>`, so the text is cut there.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    model = backend.model
    if type(model).__name__ != "BPE" or model.unk_token is not None or model.byte_fallback:
        return None
    before, behind = model.continuing_subword_prefix or "", model.end_of_word_suffix or ""
    bare = (piece.removeprefix(before).removesuffix(behind) for piece in backend.get_vocab(with_added_tokens=False))
    known = {piece for piece in bare if len(piece) == 1}
    if known.issuperset(ByteLevel.alphabet()):  # every byte of a text is one of these
        return None
    ranges: list[tuple[int, int]] = []
    for code in sorted(map(ord, known)):
        first = ranges.pop()[0] if ranges and ranges[-1][1] == code - 1 else code
        ranges.append((first, code))
    runs = [ranges[at : at + _RANGES] for at in range(0, len(ranges), _RANGES)]
    classes = ["".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in some) for some in runs]
    return "".join(f"(?![{each}])" for each in classes) + r"[\s\S]"


def _any_of(strings: Iterable[str], *, ahead: bool = False, depth: int = 0) -> str:
    """A regular expression for any of `strings`, by common prefixes: a vocabulary may have thousands of them.

    With `ahead` it matches their first character if the rest follows.
    """
    by_first: dict[str, list[str]] = {}
    for string in sorted(set(strings)):
        if not string:
            return ""  # the shortest decides
        by_first.setdefault(string[0], []).append(string)
    patterns = []
    for group in by_first.values():
        head = group[0][0] if ahead else _shared(group[0], group[-1])  # sorted: also shared by all between them
        rest = [string[len(head) :] for string in group]
        tail = _any_of(rest, depth=depth + 1) if depth < _DEEPEST else "|".join(map(re.escape, rest))
        patterns.append(re.escape(head) + (f"(?={tail})" if ahead else f"(?:{tail})" if tail else ""))
    return "|".join(patterns)


def _shared(one: str, other: str) -> str:
    """The common prefix of two strings."""
    return next((one[:i] for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(one, other, key=len))


def _refusal(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The tokenizer turns text into its control token {name!r}, so that a document could steer the model; "
        "use a model with a tokenizer.json, and with control tokens that are no ordinary text."
    )


_CONTEXTS = "\u27e6ragkv:contexts\u27e7"
_QUESTION = "\u27e6ragkv:question\u27e7"


def _fixed_date(today: datetime) -> str:
    """The beginning of a chat template whose `strftime_now` prints `today`; transformers has no argument for it."""
    directives = [f"%{flag}{letter}" for letter in "aAbBcdeFGHIjmMpSuUVwWxXyY" for flag in ("", "-")]
    replaced = "".join(f".replace({each!r}, {today.strftime(each)!r})" for each in directives)
    # {{ '' }}: jinja drops a newline after a block, and the template may begin with one
    return f"{{% macro strftime_now(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}{{{{ '' }}}}"


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
        """The BOS token, if the tokenizer puts one before every text."""
        self.eos_id: int | None = tokenizer.eos_token_id
        self.byte_ids = _byte_ids(tokenizer)
        self._control = ControlTokens(tokenizer, byte_ids=self.byte_ids)

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def control_ids(self) -> frozenset[int]:
        """The control tokens, which text of a document or a question never becomes."""
        return self._control.ids

    @property
    def serialized(self) -> str | None:
        """The tokenizer as the text of a tokenizer.json; None for one that is not of the tokenizers library."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        with self._lock:
            return None if backend is None else str(backend.to_str())

    def for_constraints(self, end_ids: Sequence[int]) -> Any:
        """llguidance's tokenizer of the same vocabulary; None for one that is neither llama.cpp's nor of the tokenizers
        library.
        """
        from llguidance import LLTokenizer

        if hasattr(self._tokenizer, "constraints"):
            return self._tokenizer.constraints(end_ids)
        text = self.serialized
        return None if text is None else LLTokenizer(text, eos_token=list(end_ids) or None)

    def encode(self, text: str, *, control: bool = False) -> tuple[int, ...]:
        """Ids of `text`, without BOS and EOS; with `control`, names of control tokens in it become these tokens.

        `control` is only for the template's own text. Without it, no text can become a control token.
        """
        text = readable(text)
        with self._lock:
            # verbose: a whole document is counted before it is cut, so a warning about its length would be wrong
            ids = self._tokenizer(text, add_special_tokens=False, split_special_tokens=not control, verbose=False)[
                "input_ids"
            ]
            if not control and not self._control.suspect.isdisjoint(ids):
                ids = self._control.plain(text)
        return tuple(ids)

    def decode(self, ids: Sequence[int], *, control: bool = False) -> str:
        """Text of generated ids, without control tokens; with `control`, with their names."""
        with self._lock:
            text: str = self._tokenizer.decode(
                list(ids), skip_special_tokens=not control, clean_up_tokenization_spaces=False
            )
        return text

    @cached_property
    def thought(self) -> tuple[str, str] | None:
        """The marks around the model's thinking, from its chat template; None if it has none."""
        template = getattr(self._tokenizer, "chat_template", None)
        match = _THOUGHT.search(template) if isinstance(template, str) else None
        if match is None:
            return None
        if "_THINKING" in match[0]:
            return "<|START_THINKING|>", "<|END_THINKING|>"
        begin = match[0].replace("/", "", 1)
        return begin, f"{begin[0]}/{begin[1:]}"

    @cached_property
    def _headers(self) -> tuple[str, str]:
        """The chat template's end of a prompt without and with thinking; cached, because rendering is slow."""
        asked = [{"role": "user", "content": _QUESTION}]
        before = self.render(asked, header=False) or ""
        off, on = ((self.render(asked, enable_thinking=each) or "").removeprefix(before) for each in (False, True))
        return off, on

    def header(self, text: str, *, thinking: bool) -> str:
        """The prompt's end for an answer with or without thinking, from `text`, the end rendered without thinking."""
        if self.thought is None:
            return text
        begin, end = self.thought
        off, on = self._headers
        if thinking:
            text = text.removesuffix(off) + on if off and text.endswith(off) else text
            return text if text.rstrip().endswith(begin) else f"{text}{begin}\n"
        if text.rstrip().endswith(begin):  # this model always thinks
            return f"{text}\n{end}\n\n"
        if end not in off and "enable_thinking" not in self._tokenizer.chat_template:
            return f"{text}{begin}\n\n{end}\n\n"
        return text

    @property
    def specials(self) -> dict[str, int]:
        """The control tokens that decoding skips, by name."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {str(token.content): i for i, token in added.items() if token.special}

    def name(self, token_id: int) -> str:
        """The vocabulary's spelling of a token."""
        return str(self._tokenizer.convert_ids_to_tokens(token_id))

    @property
    def dated(self) -> bool:
        """Whether the chat template asks for the current date."""
        return "strftime_now" in str(getattr(self._tokenizer, "chat_template", None))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        header: bool = True,
        tools: Sequence[Any] | None = None,
        enable_thinking: bool = False,
        today: datetime | None = None,
    ) -> str | None:
        """The chat template's text, with the assistant's `header` at its end; None if the model has no template.

        `today` is the date that a template gets which prints one. ChatTemplateError for a template that raises or does
        not compile. `enable_thinking` False keeps hybrid models (Qwen3, SmolLM3) from answering with a train of
        thought; other templates ignore it.
        """
        with self._lock:
            if not self.has_chat_template:
                return None
            try:
                template = self._tokenizer.get_chat_template(tools=tools or None)
                text: str = self._tokenizer.apply_chat_template(
                    list(messages),
                    chat_template=template if today is None else _fixed_date(today) + template,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=header,
                    enable_thinking=enable_thinking,
                )
            except MemoryError:
                raise
            except Exception as error:  # a template is a program of the model's author
                raise ChatTemplateError(
                    f"The chat template of {self._tokenizer.name_or_path or 'this model'} cannot be rendered "
                    f"({' '.join(str(error).split()) or type(error).__name__}); repair it, or remove it for a plain "
                    "prompt."
                ) from error
        return text


def _byte_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that stand for one byte each (`<0xE4>`) in a SentencePiece vocabulary; none in a byte-level one."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = tokenizer.convert_tokens_to_ids(names)
    known = [(i, name) for i, name in zip(ids, names, strict=True) if i is not None]  # unknown: may be the id of <unk>
    back = tokenizer.convert_ids_to_tokens([i for i, _ in known])
    return frozenset(i for (i, name), token in zip(known, back, strict=True) if token == name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The fixed text around contexts and question; `prefix_newlines` newline tokens end the prefix.

    It is stored in the index: templates may print today's date, and a prefix that changed overnight would make every
    `prefixed` chunk KV a miss.
    """

    prefix: str
    before_question: str
    after_question: str
    separator: str
    prefix_newlines: int = 0
    bos: Literal["auto", "none"] = "auto"

    def facts(self) -> dict[str, Any]:
        """All its settings, for identities and for the index; as `PromptConfig.facts`."""
        return asdict(self)

    @property
    def before_contexts(self) -> str:
        """The prefix with its newlines, as text."""
        return self.prefix + "\n" * self.prefix_newlines

    def prefix_ids(self, tokens: Tokens) -> tuple[int, ...]:
        """Ids before every context, with exactly one BOS if the model wants one, else with none (`bos`).

        The newlines are counted in tokens, as APE searches their number: as text, tokenizers would merge them.
        """
        ids = self._template_ids(tokens, self.prefix)
        if self.bos == "none" and ids[:1] == (tokens.bos_token_id,) and self._only(ids, tokens):
            ids = ids[1:]
        if self.prefix_newlines:  # a tokenizer that marks the start of a text puts that mark first
            ids += tokens.encode("\n")[-1:] * self.prefix_newlines
        return self.with_bos(tokens, ids)

    def with_bos(self, tokens: Tokens, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The ids with a BOS at their beginning, if the model wants one."""
        if self.bos == "auto" and tokens.bos_id is not None and ids[:1] != (tokens.bos_id,):
            return (tokens.bos_id, *ids)
        return ids

    def chunk_ids(self, tokens: Tokens, text: str) -> tuple[int, ...]:
        """Ids of a chunk's text within a prompt."""
        return tokens.encode(text + self.separator)

    def suffix_ids(
        self,
        tokens: Tokens,
        question: str,
        tail: Sequence[tuple[str, bool]] | None = None,
        *,
        thinking: bool = False,
    ) -> tuple[int, ...]:
        """Ids of the question and of the assistant's header, up to the first generated token.

        If `tail` is given, it replaces them: pieces of text, each with whether it is the template's own. With
        `thinking`, the header opens a thought.
        """
        if tail is None:
            tail = ((self.before_question + question, False), (self.after_question, True))
        pieces = [*tail[:-1], (tokens.header(tail[-1][0], thinking=thinking), True)]
        made = [self._template_ids(tokens, text) if own else tokens.encode(text) for text, own in pieces]
        return tuple(i for ids in made for i in ids)

    def _template_ids(self, tokens: Tokens, text: str) -> tuple[int, ...]:
        """Ids of the template's own text, without the tokenizer's BOS if `bos` asks for none."""
        ids = tokens.encode(text, control=True)
        if self.bos == "auto" or tokens.bos_id is None or tokens.bos_id == tokens.eos_id:
            return ids
        return tuple(i for i in ids if i != tokens.bos_id)

    def _only(self, ids: tuple[int, ...], tokens: Tokens) -> bool:
        """Whether the first of `ids` is a BOS and not a turn marker of the same name (SmolLM2)."""
        return tokens.bos_id is not None or ids[0] not in ids[1:] + tokens.encode(self.after_question, control=True)


def render(config: PromptConfig, tokens: Tokens, *, today: datetime | None = None) -> Prompt:
    """Cut the model's chat template into its parts; a model without one gets plain text (base models).

    A template that prints the date prints `today`; by default, it asks the clock.
    """
    lead, _, trail = config.question.partition("{question}")
    user = config.context + _CONTEXTS + _QUESTION + trail
    text = _templated(config.system, user, tokens, today)
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
    """The template's text between the assistant's header and the answer, and after the answer: taught by fine-tuning.

    A model without a template gets a space after "Answer:" and nothing after the answer.
    """
    asked = [{"role": "user", "content": _QUESTION}]
    header = tokens.render(asked)
    if header is None:
        return " ", ""
    whole = tokens.render([*asked, {"role": "assistant", "content": _CONTEXTS}], header=False) or ""
    before, found, after = whole.partition(_CONTEXTS)
    if not found:
        raise ConfigError("This model's chat template drops the assistant's message; ragkv cannot learn its end.")
    # a template may render another header when the answer is known (a train of thought): then there is no text between
    return (before.removeprefix(header) if before.startswith(header) else ""), after


def _templated(system: str, user: str, tokens: Tokens, today: datetime | None) -> str | None:
    """The rendered template; the system text goes into the user's message if the template has no system role."""
    folded = [{"role": "user", "content": f"{system}\n\n{user}"}]
    try:
        text = tokens.render([{"role": "system", "content": system}, {"role": "user", "content": user}], today=today)
    except ChatTemplateError:  # Gemma 2 and Mistral v0.1 raise on a system message
        return tokens.render(folded, today=today)
    if text is not None and system.strip() not in text:
        return tokens.render(folded, today=today)
    return text
