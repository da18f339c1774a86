"""Measure how often the mini model answers correctly, by greedy generation on worlds whose names it never saw.

This uses plain transformers on purpose: ragkv's engines `full` and `block` must reproduce these numbers.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ragkv.benchmarks.mini.layout import additive_mask, layout
from ragkv.benchmarks.mini.mixture import prose_passages
from ragkv.benchmarks.mini.sample import chunk_text, prefix_text, suffix_text
from ragkv.finetune.mask import visible
from ragkv.finetune.passage import passages
from ragkv.worlds import QuestionKind, World
from ragkv.worlds.cloze import Cloze, clozes, english_sentences, reference_texts

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["AccuracyRow", "evaluate_mini", "greedy_answers"]

LayoutName = Literal["full", "block", "single"]
Kind = Literal[QuestionKind, "cloze"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRow:
    """The share of `n` questions of one kind whose gold values are substrings of the greedy answer."""

    layout: LayoutName
    passages: int
    kind: Kind
    accuracy: float
    n: int


def evaluate_mini(
    model_dir: Path | str,
    *,
    contexts: int = 25,
    questions: int = 8,
    passage_counts: Sequence[int] = (4, 8, 12),
    layouts: Sequence[LayoutName] = ("full", "block", "single"),
    seed: int = 1,
    split: Literal["train", "heldout"] = "heldout",
) -> list[AccuracyRow]:
    """Measure the checkpoint in `model_dir` on `contexts` worlds, up to `questions` per world and kind of question.

    A context holds passages of one world. Cloze questions are asked on as many contexts from Python's language
    reference. The layout "single" has one passage. Computes in fp32 on the CPU.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, trust_remote_code=False).eval()
    return measure(
        model,
        tokenizer,
        contexts=contexts,
        questions=questions,
        passage_counts=passage_counts,
        layouts=layouts,
        seed=seed,
        split=split,
    )


def measure(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    contexts: int,
    questions: int,
    passage_counts: Sequence[int],
    layouts: Sequence[LayoutName],
    seed: int,
    split: Literal["train", "heldout"] = "heldout",
) -> list[AccuracyRow]:
    """`evaluate_mini` for a model that is already loaded."""
    hits: dict[tuple[LayoutName, int, Kind], list[bool]] = defaultdict(list)
    for index in range(contexts):
        for name in layouts:
            for count in passage_counts if name != "single" else (1,):
                rng = random.Random(f"{seed}:{index}:{count}")
                world = World.generate(seed * 1_000_003 + index, split=split, size=14 + 2 * count)
                texts = passages(rng, tokenizer, world)[:count]
                asked = world.ask(rng, world.stated(texts), questions)
                answers = greedy_answers(model, tokenizer, texts, [q.question for q in asked], block=name == "block")
                for question, answer in zip(asked, answers, strict=True):
                    hits[name, count, question.kind].append(question.right(answer))
                prose = prose_passages(rng, tokenizer, reference_texts(), count)
                blanks = _clozes(rng, prose, questions)
                answers = greedy_answers(model, tokenizer, prose, [q.question for q in blanks], block=name == "block")
                for blank, answer in zip(blanks, answers, strict=True):
                    hits[name, count, "cloze"].append(blank.gold in " ".join(answer.split()))
    return [
        AccuracyRow(layout=name, passages=count, kind=kind, accuracy=sum(found) / len(found), n=len(found))
        for (name, count, kind), found in sorted(hits.items())
    ]


def _clozes(rng: random.Random, texts: Sequence[str], count: int) -> list[Cloze]:
    """Up to `count` cloze questions about different sentences."""
    sentences = list(dict.fromkeys(sentence for text in texts for sentence in english_sentences(text)))
    rng.shuffle(sentences)
    return [cloze for sentence in sentences for cloze in clozes(rng, sentence)][:count]


def greedy_answers(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    questions: Sequence[str],
    *,
    block: bool = False,
    max_new_tokens: int = 96,
) -> list[str]:
    """Greedy answers to questions on one context, which is run once; the questions are one batch."""
    import torch
    from transformers import DynamicCache

    if not questions:
        return []

    encoded = tokenizer([prefix_text(), *map(chunk_text, texts)], add_special_tokens=False)["input_ids"]
    asked = tokenizer([suffix_text(question) for question in questions], add_special_tokens=False)["input_ids"]
    flat = [token for part in encoded for token in part]
    row = layout(len(encoded[0]), [len(part) for part in encoded[1:]], [])
    device, rows, context = model.device, len(questions), len(flat)

    def tensor(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    seen = visible(tensor([row.segments]), tensor([row.asks], torch.bool), tensor([block], torch.bool))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model.model(
            input_ids=tensor([flat]),
            attention_mask=additive_mask(seen, model.dtype),
            position_ids=tensor([row.positions]),
            past_key_values=cache,
            use_cache=True,
        )
        cache.batch_repeat_interleave(rows)
        longest = max(map(len, asked))
        pads = tensor([longest - len(ask) for ask in asked])  # left padding, (rows,)
        tokens = tensor([[int(tokenizer.pad_token_id)] * (longest - len(ask)) + ask for ask in asked])
        answers: list[list[int]] = [[] for _ in questions]
        open_rows = [True] * rows
        width, start = longest, 0  # tokens in this step, question tokens in earlier steps
        for _ in range(max_new_tokens):
            keys = torch.arange(context + start + width, device=device)
            queries = torch.arange(start, start + width, device=device)
            own = (keys - context)[None, None, :]  # key index within the question row
            reads = (own < 0) | ((own >= pads[:, None, None]) & (own <= queries[None, :, None]))
            reads = reads | (own == queries[None, :, None])  # padding sees itself, so that no softmax is empty
            hidden = model.model(
                input_ids=tokens,
                attention_mask=additive_mask(reads[:, None], model.dtype),
                position_ids=(context + queries[None] - pads[:, None]).clamp_min(0),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            tokens = model.lm_head(hidden[:, -1:]).argmax(-1)  # (rows, 1)
            for index, token in enumerate(tokens[:, 0].tolist()):
                if open_rows[index] and token == tokenizer.eos_token_id:
                    open_rows[index] = False
                elif open_rows[index]:
                    answers[index].append(token)
            if not any(open_rows):
                break
            start, width = start + width, 1
    return [str(tokenizer.decode(answer, skip_special_tokens=True)) for answer in answers]
