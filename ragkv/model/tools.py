"""Tool calls in a model's own form: how its chat template shows tools, calls and results, and a grammar of the calls.

The beginning of the prompt belongs to the stored KV and cannot change, so tools are shown next to the question, in the
template's words. The form of a call is read off the template by rendering a call with known names. If a template has no
tools, or does not write arguments as JSON, the form of Hermes is used (`<tool_call>`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ragkv.decoding import overlap
from ragkv.errors import UsageError
from ragkv.model.prompt import ChatTemplateError

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel
    from ragkv.model.prompt import Prompt, Tokens

Tail = tuple[tuple[str, bool], ...]
"""The prompt after the documents, in pieces: a text, and whether it is the template's and may hold control tokens."""

_NAME, _ID = "ragkvname", "ragkvid01"
_SYSTEM, _QUESTION = "\u27e6ragkv:system\u27e7", "\u27e6ragkv:question\u27e7"
_GIVEN = re.compile('\u27e6(\\d+)\u27e7|\\{\\s*"ragkvkey"\\s*:\\s*"\u27e6(\\d+)\u27e7"\\s*\\}')
_MARKER = re.compile(r"[<\[]\S+?[>\]]")
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How calls are written: `begin` NAME `middle` ARGUMENTS, for each further one `again` NAME …, and `end`.

    `again` None: there is only one call at a time. `native`: the chat template itself writes calls and their results.
    `specials`: the ids of control tokens that decoding leaves out, by name.
    """

    begin: str = '<tool_call>\n{"name": "'
    middle: str = '", "arguments": '
    again: str | None = '}\n</tool_call>\n<tool_call>\n{"name": "'
    end: str = "}\n</tool_call>"
    native: bool = False
    specials: Mapping[str, int]

    def grammar(self, tools: Sequence[Mapping[str, Any]], *, required: bool, several: bool, schema: Any = None) -> str:
        """The Lark grammar of an answer: text (or JSON by `schema`), then calls of these functions; `required`: calls
        alone."""
        begin = self.begin.lstrip()
        first = self._pieces(begin)[0]
        again = f"({self._literals(self.again)} call)*" if several and self.again is not None else ""
        rest = f"call {again} {self._literals(self.end)}"
        lines = [f"calls: {self._literals(begin)} {rest}"]
        if required:
            lines.append("start: calls")
        elif schema is not None:
            lines += ["start: calls | answer", f"answer: {_json_rule(schema)}"]
        elif first in self.specials:  # no text can contain it
            lines += ["start: TEXT? calls | TEXT", "TEXT: /(?s:.+)/"]
        else:
            found = _MARKER.match(first)
            mark = first if found is None else found[0]
            lines += [
                f"start: TEXT | before {self._literals(begin[len(mark) :])} {rest}",
                f"TEXT: /(?s:.+)/ & ~/(?s:.*){_regex(mark)}(?s:.*)/",
                f"before[lazy]: /(?s:.*){_regex(mark)}/",
            ]
        names = [f"{_quoted(tool['name'])} {self._literals(self.middle)} arguments_{i}" for i, tool in enumerate(tools)]
        lines.append("call: " + " | ".join(names))
        lines += [f"arguments_{i}: {_json_rule(tool['parameters'])}" for i, tool in enumerate(tools)]
        return "\n".join(lines)

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, (name, arguments), as the model writes them."""
        each = [f"{name}{self.middle}{arguments}" for name, arguments in calls]
        return self.begin + (self.again or f"{self.end}\n{self.begin}").join(each) + self.end

    def _pieces(self, text: str) -> list[str]:
        names = sorted([*self.specials, _ID], key=len, reverse=True)
        return [piece for piece in re.split(f"({'|'.join(map(re.escape, names))})", text) if piece]

    def _literals(self, text: str) -> str:
        known = {name: f"<[{i}]>" for name, i in self.specials.items()} | {_ID: "/[A-Za-z0-9]{9}/"}
        return " ".join(known.get(piece) or _quoted(piece) for piece in self._pieces(text))


def tool_format(model: LanguageModel) -> ToolFormat:
    """The form of the model's template, else that of Hermes."""
    return model.companion(_format_of)


def _format_of(model: LanguageModel) -> ToolFormat:
    tokens = model.tokens
    try:
        read = _read_format(tokens, {tokens.name(each) for each in model.eos_ids})
    except (ChatTemplateError, TypeError, ValueError):
        read = None
    return ToolFormat(**(read or {}), specials=tokens.specials)


def _read_format(tokens: Tokens, ends: set[str]) -> dict[str, Any] | None:
    """The form in which the chat template writes calls; None if it writes none, or not as JSON. It may raise."""
    user = {"role": "user", "content": _QUESTION}
    asked = [tokens.render([user], enable_thinking=thinking) for thinking in (False, True)]
    if asked[0] is None:
        return None
    called = {"role": "assistant", "content": "", "tool_calls": [_call(_NAME, _ID, "0")]}
    result = {"role": "tool", "content": "\u27e61\u27e7", "name": _NAME, "tool_call_id": _ID}
    if "\u27e61\u27e7" not in (tokens.render([user, called, result]) or ""):
        return None
    written = _after_question(tokens.render([user, called], header=False))
    headers = [head for each in asked if written.startswith(head := _after_question(each))]
    if not headers:
        return None
    begin, named, rest = written.removeprefix(max(headers, key=len)).partition(_NAME)
    arguments = _GIVEN.search(rest)
    if not (begin.strip() and named and arguments and arguments[2]):
        return None
    again: str | None = None
    try:
        both = {**called, "tool_calls": [_call(_NAME, _ID, "0"), _call(_NAME, _ID, "0")]}
        second = _after_question(tokens.render([user, both], header=False)).partition(arguments[0])[2]
        again = second.partition(_NAME)[0] if _NAME in second else None
    except ChatTemplateError:  # the template takes one call at a time
        again = None
    end = rest[arguments.end() :]
    cut = min((at for name in ends if (at := end.find(name)) >= 0), default=len(end.rstrip()))
    return {"begin": begin, "middle": rest[: arguments.start()], "again": again, "end": end[:cut], "native": True}


def _call(name: str, identifier: str, place: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {"ragkvkey": f"\u27e6{place}\u27e7"}}
    return {"id": identifier, "type": "function", "function": function}


def _after_question(text: str | None) -> str:
    return (text or "").partition(_QUESTION)[2]


def _json_rule(schema: Any) -> str:
    shown = dict(schema) if isinstance(schema, Mapping) else schema
    return "%json " + json.dumps({**shown, "x-guidance": {"lenient": False, **_LAYOUT}}, ensure_ascii=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def tool_tail(
    model: LanguageModel,
    prompt: Prompt,
    question: str,
    tools: Sequence[Mapping[str, Any]],
    later: Sequence[Mapping[str, Any]],
) -> Tail:
    """The prompt after the documents: the tools, the question, and the messages after it, OpenAI's calls and results.

    UsageError if the model cannot be shown these tools or messages.
    """
    form, tokens = tool_format(model), model.tokens
    shown = _functions(tokens, tools, later)
    before: Tail = ((f"{_shown_tools(tokens, form, shown)}\n\n", True),) if tools else ()
    asked: Tail = (*before, (prompt.before_question + question, False))
    if not later:
        return (*asked, (prompt.after_question, True))
    alone = _after_question(tokens.render([{"role": "user", "content": _QUESTION}]))
    after = prompt.after_question
    trail = after.removesuffix(alone) if alone and after.endswith(alone) else ""
    for native in (True, False) if form.native else (False,):
        texts: list[str] = []
        messages = _native(later, texts) if native else _plain(later, form, texts)
        try:
            rendered = tokens.render([{"role": "user", "content": _QUESTION}, *messages])
        except (ChatTemplateError, TypeError, ValueError):
            continue
        if rendered is None:  # a model without a chat template
            rendered = _QUESTION + "".join(f"\n\n{m['role'].title()}: {m['content']}" for m in messages) + "\nAnswer:"
        pieces = list(_split(_after_question(rendered), texts))
        if sum(not own for _, own in pieces) == len(texts):
            return (*asked, (trail, True), *pieces)
    raise UsageError("The model's chat template cannot show tool calls and their results.", param="messages")


def chat_tail(
    model: LanguageModel, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> Tail:
    """A whole prompt without documents: OpenAI's messages as the model's chat template has them, and the tools.

    If the template has no system role, the system's text begins the user's first message. UsageError if the model
    cannot be shown these messages.
    """
    form, tokens = tool_format(model), model.tokens
    shown = _functions(tokens, tools, messages)
    messages = [{**m, "role": "system" if m["role"] == "developer" else m["role"]} for m in messages]
    if tools and not form.native:
        messages = [{"role": "system", "content": _shown_tools(tokens, form, shown)}, *messages]
    rules = "\n\n".join(m["content"] for m in messages if m["role"] == "system" and m["content"])
    turns = [m for m in messages if m["role"] != "system"]
    first = next((place for place, m in enumerate(turns) if m["role"] == "user"), 0)
    folded = [{**m, "content": f"{rules}\n\n{m['content']}"} if place == first else m for place, m in enumerate(turns)]
    leading = [{"role": "system", "content": rules}, *turns] if rules else turns
    for native in (True, False) if form.native else (False,):
        for talk in (messages, leading, folded or leading):
            texts: list[str] = []
            placed = _native(talk, texts) if native else _plain(talk, form, texts)
            try:
                rendered = tokens.render(placed, tools=shown if native else None)
            except (ChatTemplateError, TypeError, ValueError):
                continue
            if rendered is None:  # a model without a chat template
                rendered = "\n\n".join(f"{m['role'].title()}: {m['content']}" for m in placed) + "\n\nAssistant:"
            pieces = list(_split(rendered, texts))
            if sum(not own for _, own in pieces) == len(texts):
                return tuple(pieces)
    raise UsageError("The model's chat template cannot show these messages.", param="messages")


def _functions(
    tokens: Tokens, tools: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The tools as a template gets them; UsageError for a name or description that the template's text may not hold."""
    shown = [{"type": "function", "function": dict(tool)} for tool in tools]
    text = json.dumps([*shown, [[call["function"]["name"] for call in m.get("tool_calls") or ()] for m in messages]])
    if not tokens.control_ids.isdisjoint(tokens.encode(text, control=True)):
        raise UsageError("A tool's description names a control token of the model; rephrase it.", param="tools")
    return shown


def _shown_tools(tokens: Tokens, form: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """The template's text for these tools, if it is one text that fits into the user's turn; else a similar text."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _QUESTION}]
    try:
        without, text = tokens.render(messages) or "", tokens.render(messages, tools=tools) or ""
        least = min(len(without), len(text))
        start = next((i for i in range(least) if without[i] != text[i]), least)
        most = least - start
        end = next((i for i in range(most) if without[-1 - i] != text[-1 - i]), most)
        added = text[start : len(text) - end].strip()
        if form.native and tools[0]["function"]["name"] in added and len(without) == start + end:
            return added
    except (ChatTemplateError, TypeError, ValueError):
        pass
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = form.written([("NAME", '{"ARGUMENT": "VALUE"}')])
    return f"You may call these functions:\n{lines}\nTo call one, answer with its name and arguments:\n{call}"


def _split(text: str, texts: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Split the template's text at the placeholders of `given`, and put those texts there."""
    start = 0
    for match in _GIVEN.finditer(text):
        yield text[start : match.start()], True
        value = texts[int(match[1] or match[2])]
        quoted = match[1] and text[match.start() - 1 : match.start()] == text[match.end() : match.end() + 1] == '"'
        yield json.dumps(value, ensure_ascii=False)[1:-1] if quoted else value, False
        start = match.end()
    yield text[start:], True


def _native(later: Sequence[Mapping[str, Any]], texts: list[str]) -> list[dict[str, Any]]:
    """The messages for the template, with placeholders for texts, which are appended to `given`."""

    def place(text: str) -> str:
        texts.append(text)
        return str(len(texts) - 1)

    messages: list[dict[str, Any]] = []
    names: dict[str, tuple[str, str]] = {}
    for message in later:
        content = f"\u27e6{place(message['content'])}\u27e7" if message.get("content") else ""
        if message["role"] == "tool":
            name, identifier = names.get(message.get("tool_call_id") or "", ("", _ID))
            messages.append({"role": "tool", "content": content, "name": name, "tool_call_id": identifier})
            continue
        calls = []
        for call in message.get("tool_calls") or ():
            identifier = f"ragkvid{len(names):02}"[-9:]
            names[call["id"]] = call["function"]["name"], identifier
            calls.append(_call(call["function"]["name"], identifier, place(call["function"]["arguments"])))
        messages.append({"role": message["role"], "content": content, **({"tool_calls": calls} if calls else {})})
    return messages


def _plain(later: Sequence[Mapping[str, Any]], form: ToolFormat, texts: list[str]) -> list[dict[str, Any]]:
    """The messages for a template without tools: results become messages of the user."""
    turns: list[tuple[str, str]] = []
    for message in later:
        role, text = message["role"], message.get("content") or ""
        if message["role"] == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        elif calls := [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]:
            text = f"{text}\n{form.written(calls)}".lstrip()
        if turns and turns[-1][0] == role:
            text = f"{turns.pop()[1]}\n{text}"
        turns.append((role, text))
    messages = []
    for role, text in turns:
        texts.append(text)
        messages.append({"role": role, "content": f"\u27e6{len(texts) - 1}\u27e7"})
    return messages


class ToolCallParser:
    """Separates an answer's text from the calls in it while it is generated under a `ToolFormat.grammar`."""

    def __init__(self, form: ToolFormat) -> None:
        self._begin = form.begin.strip()
        self._middle = form.middle
        self._again = None if form.again is None else re.compile(re.escape(form.again).replace(_ID, "[A-Za-z0-9]{9}"))
        self._held = ""
        self._state: Literal["text", "name", "arguments", "after"] = "text"
        self._depth = 0
        self._string = self._escaped = False
        self.calls: list[tuple[str, str]] = []
        """Name and arguments of each call so far; the last one may be incomplete."""

    def push(self, text: str) -> Iterator[str | tuple[int, str | None, str]]:
        """Yield what `text` adds: text of the answer, or (call, its name at its beginning, more of its arguments)."""
        self._held += text
        while self._held:
            if self._state == "text":
                before, marker, after = self._held.partition(self._begin)
                keep = 0 if marker else overlap(before, self._begin)
                shown = before[: len(before) - keep]
                self._held = after if marker else before[len(shown) :]
                if shown:
                    yield shown
                self._state = "name" if marker else "text"
                if not marker:
                    return
            elif self._state == "name":
                name, marker, after = self._held.partition(self._middle)
                if not marker:
                    return
                self.calls.append((name, ""))
                self._held, self._state = after, "arguments"
                yield len(self.calls) - 1, name, ""
            elif self._state == "arguments":
                size = self._scan(self._held)
                name, so_far = self.calls.pop()
                self.calls.append((name, so_far + self._held[:size]))
                yield len(self.calls) - 1, None, self._held[:size]
                self._held = self._held[size:]
            else:
                again = None if self._again is None else self._again.match(self._held)
                if again is None:
                    return
                self._held, self._state = self._held[again.end() :], "name"

    def flush(self) -> str:
        """The text that was held back because a call might have begun."""
        return self._held if self._state == "text" else ""

    def _scan(self, text: str) -> int:
        """How much of `text` belongs to the JSON object that is open."""
        for size, char in enumerate(text, start=1):
            if self._string:
                self._string = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if not self._depth:
                    self._state = "after"
                    return size
        return len(text)
