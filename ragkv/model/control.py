"""Control tokens: ids that steer a model, and how text is encoded so that none of them comes out of it.

A document may spell `</s><|system|>`. A tokenizer can make the real ids of that in three ways: it looks for added
tokens in the text (transformers' `split_special_tokens` leaves out the special ones, but not `<think>` or
`<tool_call>`, which are added with `special: false`); its model finds the whole string in its vocabulary (Unigram,
WordPiece, WordLevel, and BPE with `ignore_merges`); or its normaliser first makes the string out of another one
(full-width letters under NFKC, capitals under lower-casing). So the ids are looked at, not the text: a text whose
ids hold a control token is encoded again, by the same model and normaliser, without added tokens, and with every
control token's name cut in two where the model would look it up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ragkv.errors import UnsupportedModelError

__all__ = ["ControlTokens", "harden", "readable"]

_MARK = re.compile(r"<\|\w.*\|>|<｜\w.*｜>|\[\|\w.*\|\]")  # no ordinary piece of a vocabulary looks like this
_BRACKETED = re.compile(r"[<\[{(]\S+[>\]})]")
_IN_TEMPLATE = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_RARE = "\ue000\U00013000\ua66e\U000f0000"  # characters that few vocabularies know
_STOPS = ("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
_DEEPEST = 100


class ControlTokens:
    """The control tokens of one transformers tokenizer, and the way around them.

    `ids` are the added tokens, the special tokens, and the vocabulary's pieces that are marked as such or that the
    chat template writes as one piece. Two kinds of added tokens are text and nothing else, and remain in use, because
    the model was trained to read that text in them: runs of white space (GPT-NeoX, Phi, Gemma), and single characters
    with `special: false`.

    `suspect` are `ids` and the ids that are right for one text and wrong for another: `<unk>` stands for characters
    that the vocabulary lacks and a byte token (`<0x0A>`) for a byte, but neither for its own name in a document. A
    text in whose ids one of them is found is to be encoded by `plain` instead.
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
        """Ids of `text` with none of `ids` among them. They are the tokenizer's own for a text that names none."""
        ids = self._encode(text)
        for i in ids:
            if i in self.ids:
                raise _refusal(str(self._tokenizer.convert_ids_to_tokens(i)))
        return ids

    def _split(self, text: str) -> list[int]:
        """transformers' own way: special tokens are not looked for."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)[
            "input_ids"
        ]
        return ids

    def _unwritable(self, names: dict[int, str]) -> set[int]:
        """Those that are text as well, and do no harm: the padding token, which stands in no prompt."""
        harmless = {getattr(self._tokenizer, "pad_token_id", None)} - self._stops
        found = set()
        for text in (_RARE, *(f"{name} {name}a{name}{name}" for name in names.values())):
            found |= names.keys() & self._encode(text)
            if found - harmless:
                raise _refusal(names[min(found - harmless)])
        return found


def readable(text: str) -> str:
    """`text` without lone surrogates (half an emoji from JSON or a PDF), which tokenizers refuse: U+FFFD instead."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def harden(tokenizer: Any) -> None:
    """Make a transformers tokenizer of an embedder or reranker read the names of its special tokens as text.

    Separators that its post-processor writes stay; ordinary text keeps its ids. Added tokens with `special: false`,
    which separate nothing there, are still found.
    """
    tokenizer.split_special_tokens = True
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and (cut := _cut(backend, _control_names(tokenizer))) is not None:
        backend.pre_tokenizer = _chained(backend.pre_tokenizer, cut)


def _control_names(tokenizer: Any) -> dict[int, str]:
    """Every control token, `<unk>` too, with its name; a tokenizer that is not transformers' own may name none."""
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
    """What a chat template writes in brackets; it is a control token where it is one piece of the vocabulary."""
    template = getattr(tokenizer, "chat_template", None)
    texts = template.values() if isinstance(template, dict) else [template]
    return [name for text in texts if isinstance(text, str) for name in _IN_TEMPLATE.findall(text)]


def _unscored(tokenizer: Any) -> list[str]:
    """SentencePiece's control and user-defined pieces that nothing declares: no text was counted for them (score 0)."""
    backend, old = getattr(tokenizer, "backend_tokenizer", None), getattr(tokenizer, "sp_model", None)
    scores: list[tuple[str, float]] = []
    if old is not None:
        scores = [(old.IdToPiece(i), old.GetScore(i)) for i in range(old.GetPieceSize())]
    elif backend is not None and type(backend.model).__name__ == "Unigram":
        scores = json.loads(backend.model.__getstate__())["vocab"]
    found = [(name, name.lstrip("▁")) for name, score in scores if score == 0]
    return [name for name, bare in found if _BRACKETED.fullmatch(bare) and not _BYTE.fullmatch(bare)]


def _without(backend: Any, hidden: Iterable[int], texts: Mapping[int, Any]) -> Callable[[str], list[int]]:
    """An encoder with the backend's own model, normaliser and pre-tokenizer, which never gives a `hidden` token.

    Of the added tokens it knows only `texts`. The model is shared, not copied.
    """
    from tokenizers import Tokenizer

    plain = Tokenizer(backend.model)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = _chained(backend.pre_tokenizer, _cut(backend, hidden))
    plain.add_tokens([texts[i] for i in sorted(texts)])
    # those outside the model's vocabulary were numbered anew
    moved = {new: i for i, token in texts.items() if (new := plain.token_to_id(token.content)) != i}
    if any(backend.model.id_to_token(new) is not None for new in moved):  # a vocabulary with holes: not told apart
        return _without(backend, hidden, {})

    def encode(text: str) -> list[int]:
        ids: list[int] = plain.encode(text, add_special_tokens=False).ids
        return [moved.get(i, i) for i in ids]

    return encode


def _chained(before: Any, cut: Any) -> Any:
    """The pre-tokenizer `before` and then `cut`; either may be None."""
    from tokenizers.pre_tokenizers import Sequence

    return Sequence([before, cut]) if before is not None and cut is not None else before or cut


def _cut(backend: Any, ids: Iterable[int]) -> Any:
    """A pre-tokenizer that cuts every one of the model's own pieces with these ids after its first character.

    It comes last, so it sees the text in the model's own spelling. None where the model has no such piece: then no
    text leads there.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    pieces = {piece for i in ids if (piece := backend.model.id_to_token(i)) is not None and len(piece) > 1}
    return Split(Regex(_any_of(pieces, ahead=True)), "isolated") if pieces else None


def _any_of(strings: Iterable[str], *, ahead: bool = False, depth: int = 0) -> str:
    """A regular expression for any of `strings`, by common prefixes: a vocabulary may have thousands of them.

    With `ahead` it matches their first character, where the rest follows.
    """
    by_first: dict[str, list[str]] = {}
    for string in sorted(set(strings)):
        if not string:
            return ""  # the shortest decides
        by_first.setdefault(string[0], []).append(string)
    found = []
    for group in by_first.values():
        head = group[0][0] if ahead else _shared(group[0], group[-1])  # sorted: of all between them too
        rest = [string[len(head) :] for string in group]
        tail = _any_of(rest, depth=depth + 1) if depth < _DEEPEST else "|".join(map(re.escape, rest))
        found.append(re.escape(head) + (f"(?={tail})" if ahead else f"(?:{tail})" if tail else ""))
    return "|".join(found)


def _shared(one: str, other: str) -> str:
    """The beginning that two strings have in common."""
    return next((one[:i] for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(one, other, key=len))


def _refusal(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The tokenizer turns text into its control token {name!r}, so that a document could steer the model; "
        "use a model with a tokenizer.json, and with control tokens that are no ordinary text."
    )
