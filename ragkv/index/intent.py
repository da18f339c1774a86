"""Messages that are no question to the documents: a greeting, thanks, or the wish for a summary.

A message counts only if it is nothing else: "hello" does, "hello world program?" is a question like any other. A
search for its words would find nothing, and a model that was trained to answer from passages refuses all three.

A summary is made from the documents' beginnings instead of a search. A small model cannot write one: smollm2 says "It
is about the documents", so below `SUMMARY_PARAMETERS` it is an outline in the documents' own words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePosixPath

from ragkv.index.snippets import passage_sentences
from ragkv.store import StoredDocument
from ragkv.types import IntentName, ScoredChunk

SUMMARY_PARAMETERS = 1_000_000_000
"""The least parameters of a model that writes summaries itself."""
MAX_SUMMARY_CHUNKS = 32
"""How much of a document's beginning an outline reads."""
_MAX_WORDS, _MAX_PARTS, _MAX_PART_CHARS, _MAX_SENTENCES = 12, 12, 200, 200


@dataclass(frozen=True, slots=True)
class Intent:
    """What a message wants. `reply` is the answer if it needs neither documents nor the model; `documents`, for a
    summary, is "one", "several", or a document's name.
    """

    name: IntentName
    reply: str = ""
    documents: str = ""


QUESTION = Intent("question")
_SMALL_TALK = (  # greeting, its reply, thanks, their reply
    (
        r"(?:hello|hi|hey|hiya|greetings|good (?:morning|afternoon|evening|day))(?: there| everyone)?(?: how are you)?",
        "Hello! Ask me about the documents: I answer from them and show the passages.",
        r"(?:thanks|thank you|thx|cheers)(?: very much| so much| a lot| again| for your help)?|many thanks",
        "You're welcome. Ask whenever there is something else to find in the documents.",
    ),
    (
        r"hallo|hi zusammen|guten (?:morgen|tag|abend)|grüß gott|moin|servus",
        "Hallo! Frag mich nach den Dokumenten: Ich antworte aus ihnen und zeige die Stellen.",
        r"danke(?: schön| sehr| dir| ihnen)?|vielen dank|besten dank",
        "Gern geschehen. Frag, sobald in den Dokumenten noch etwas zu finden ist.",
    ),
    (
        r"bonjour|salut|bonsoir|coucou",
        "Bonjour ! Posez-moi une question sur les documents : je réponds d'après eux et montre les passages.",
        r"merci(?: beaucoup| bien)?",
        "Avec plaisir. Demandez quand il y a autre chose à trouver dans les documents.",
    ),
    (
        r"hola|buenos días|buenas(?: tardes| noches)?",
        "¡Hola! Pregúntame sobre los documentos: respondo con ellos y muestro los pasajes.",
        r"(?:muchas )?gracias",
        "De nada. Pregunta cuando haya algo más que buscar en los documentos.",
    ),
    (
        r"ciao|salve|buongiorno|buonasera",
        "Ciao! Chiedimi dei documenti: rispondo da quelli e mostro i passaggi.",
        r"grazie(?: mille)?",
        "Prego. Chiedi quando c'è altro da trovare nei documenti.",
    ),
)
_REPLIES: tuple[tuple[re.Pattern[str], IntentName, str], ...] = (
    *((re.compile(words), "greeting", reply) for words, reply, _, _ in _SMALL_TALK),
    *((re.compile(words), "thanks", reply) for _, _, words, reply in _SMALL_TALK),
)

_ONE = "document|file|text|pdf|page|paper|report|article"
_SUMMARISE = (
    r"(?:please )?(?:can you |could you )?(?:please )?"
    r"(?:summari[sz]e|sum up|outline|(?:give me |write )?an? (?:short |brief )?summary of|tl ?dr)"
)
_SUMMARIES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{_SUMMARISE}(?: (?:it|this|that|here))?(?: for me)?(?: please)?|summary",
        rf"{_SUMMARISE} (?:this|the|that|my) (?:{_ONE})(?: please| for me)?",
        rf"what(?: is|s) (?:this|that|it|(?:this|the|that|my) (?:{_ONE})) (?:all )?about",
        r"(?:bitte )?fasse? (?:dieses|das|die|diese|den) (?:dokument|datei|text) zusammen|zusammenfassung(?: bitte)?",
        r"worum geht es(?: hier| in diesem dokument| in dem dokument| im dokument)?",
        r"résume[rz]? (?:ce|le) (?:document|texte|fichier)|de quoi parle (?:ce|le) (?:document|texte)",
        r"resume (?:este|el) (?:documento|texto|archivo)|de qué trata (?:este|el) (?:documento|texto)",
        r"riassumi (?:questo|il) (?:documento|testo|file)|di cosa parla (?:questo|il) (?:documento|testo)",
    )
)
_ALL_SUMMARIES = tuple(
    re.compile(pattern)
    for pattern in (
        rf"{_SUMMARISE} (?:these|the|my|all|all the|all my|all these) (?:{_ONE})s(?: please)?",
        rf"what are (?:these|the|my) (?:{_ONE})s (?:all )?about",
        r"what(?: is|s) in (?:here|this index|these documents|the documents|my documents)",
        r"(?:bitte )?fasse? (?:diese|die) dokumente zusammen|résume[rz]? (?:ces|les) documents",
        r"resume (?:estos|los) documentos|riassumi (?:questi|i) documenti",
    )
)
_NAMED_SUMMARY = re.compile(rf"{_SUMMARISE} (?:the (?:{_ONE}) |the )?(?P<name>.+?)(?: (?:{_ONE}))?(?: please)?")


def intent_of(message: str) -> Intent:
    """The intent of a whole message."""
    words = _words(message)
    if not words or words.count(" ") >= _MAX_WORDS:
        return QUESTION
    for pattern, name, reply in _REPLIES:
        if pattern.fullmatch(words):
            return Intent(name, reply)
    for patterns, documents in ((_SUMMARIES, "one"), (_ALL_SUMMARIES, "several")):
        if any(pattern.fullmatch(words) for pattern in patterns):
            return Intent("summary", documents=documents)
    named = _NAMED_SUMMARY.fullmatch(words)
    return Intent("summary", documents=named["name"]) if named else QUESTION


def summarised(intent: Intent, documents: Iterable[StoredDocument], most: int) -> list[StoredDocument]:
    """The documents that a summary is asked of: the one that is named, or the latest of these; none if the name is
    that of no document, so that the message is a question after all.
    """
    if intent.documents in ("one", "several"):
        latest = sorted(documents, key=lambda stored: (-stored.ingested_at, stored.document.document_id))
        return latest[: 1 if intent.documents == "one" else most]
    return [stored for stored in documents if intent.documents in _names(stored)][:1]


def outline(chunks: Sequence[ScoredChunk]) -> str:
    """What the documents with these chunks are about, in their own words: the title, and the first sentence of each
    part, as Markdown.
    """
    by_document: dict[str, list[ScoredChunk]] = {}
    for scored in chunks:
        by_document.setdefault(scored.source, []).append(scored)
    return "\n\n".join(_outline(source, own, short=len(by_document) > 1) for source, own in by_document.items())


def _outline(source: str, chunks: Sequence[ScoredChunk], *, short: bool) -> str:
    parts = list(islice(_parts(chunks), _MAX_SENTENCES))
    title = parts[0][0] if parts else ""
    head = f"**{title}** ({source})" if title else f"**{source}**"
    sections: dict[str, str] = {}
    for name, sentence in parts:
        sections.setdefault(name, sentence)
    opening = sections.pop(title, "")
    if short:
        return f"- {head}: {', '.join(sections) or opening}"
    lines = [f"- **{name}**: {sentence}" for name, sentence in sections.items()]
    if not lines:
        opening, lines = "", [f"- {sentence}" for _, sentence in parts]
    lines = [*lines[:_MAX_PARTS], *(["- …"] if len(lines) > _MAX_PARTS else [])]
    return "\n\n".join(filter(None, [f"{head}, in its own words:", opening, "\n".join(lines)]))


def _parts(chunks: Sequence[ScoredChunk]) -> Iterator[tuple[str, str]]:
    """(heading, first sentence) of each paragraph."""
    heading, known = "", set[str]()
    for scored in chunks:
        text, end = scored.chunk.text, 0
        for sentence in passage_sentences(text):
            between, words = text[end : sentence.start], sentence.plain(text)
            begins = end == 0 or sentence.kind == "row" or between.count("\n") > 1
            if sentence.kind == "title":
                heading = words.lstrip("# ")
            elif sentence.kind != "code" and (len(words.split()) > 2 or not words.isascii()):
                if begins and words not in known:
                    known.add(words)  # chunks may overlap
                    cut = words if len(words) <= _MAX_PART_CHARS else f"{words[:_MAX_PART_CHARS].rpartition(' ')[0]} …"
                    yield heading, cut
            else:
                continue  # the paragraph begins with what is no sentence ("Dear all,")
            end = sentence.end


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold().replace("'", "").replace("’", "")))


def _names(stored: StoredDocument) -> set[str]:
    """The ways to name a document, as words."""
    path = PurePosixPath(stored.document.source)
    return {_words(name) for name in (str(path), path.name, path.stem, stored.document.title or "") if name}
