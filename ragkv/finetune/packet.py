"""`ragkv finetune packet`: train the vectors around every chunk for a user's model (KV Packet, arXiv 2604.13226).

The model is frozen. It writes an answer to each question under full attention. The same answer is then read in the
block layout, in which every chunk is surrounded by the packet's vectors, and these learn to give each of its tokens the
distribution that it had under full attention: the loss is KL(full ‖ packet). As in the authors' code, the prompt's
prefix is a block without a packet, all chunks have one, and only the question sees more than its own block.

Rows are laid out by the code that `ragkv finetune block` uses, which places blocks as the engine does.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ragkv.attention.sequence import TokenSequence
from ragkv.engines import make_engine, require_supported
from ragkv.errors import UsageError
from ragkv.finetune.block import NAME, RowMask, stop_on_interrupt
from ragkv.finetune.config import PacketConfig, require_layout, resumed_settings
from ragkv.finetune.data import (
    IGNORED,
    ExampleTokens,
    PackedRow,
    Progress,
    TrainingExample,
    collate,
    file_digest,
    lay_out,
    read_examples,
    tokenise,
)
from ragkv.finetune.training import Training, drawn
from ragkv.model.checkpoint import pick_device, resolve
from ragkv.model.language_model import weights_digest
from ragkv.model.packet import embed, make_packet, wrap

if TYPE_CHECKING:
    from ragkv.model.language_model import LanguageModel

_HELDOUT = 8
"""One in this many questions is held out to measure the result."""
_STD = 0.02
"""The standard deviation of the initial vectors; the paper's."""


def train_packet(config: PacketConfig, *, on_progress: Progress | None = None) -> dict[str, Any]:
    """Train a packet for `config.model`, write it to `config.output`, and return a summary.

    The summary has KL(full ‖ block) per answer token and the share of tokens that `full` would have chosen, on held-out
    questions, without and with the packet. A checkpoint beside the file lets the same settings continue; it is deleted
    at the end.

    Raises UsageError for bad data or a run of other settings, UnsupportedModelError for a model that the engine `block`
    does not run exactly or that takes no input vectors, and KeyboardInterrupt if it is interrupted, after writing a
    checkpoint.
    """
    from ragkv.model.self_check import load_model

    output = config.output.expanduser()
    if output.is_dir() or not output.parent.is_dir():
        raise UsageError(f"{output} cannot be written; name a file in a folder that is there.")
    config = replace(config, prompt=resolve(config.model).tuned_words(config.prompt))
    examples, heldout = _examples(config)
    device = pick_device(config.device)
    half = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    model = load_model(config.model, dtype="bfloat16" if half else "float32", device=str(device), train=True)
    require_supported(make_engine("block", {}), model)
    model.require_vectors()
    settings = resumed_settings(config)
    for name in ("data", "eval_data"):
        settings[name] = None if (path := getattr(config, name)) is None else file_digest(path)
    settings |= {"prompt": config.prompt.facts(), "model": weights_digest(model), "half": half}
    training = PacketTraining(config, model)
    asked = [tokenise(model, part) for part in (examples, heldout)]
    steps = training.steps(len(examples))
    optimizer = torch.optim.AdamW([training.vectors], lr=config.lr, weight_decay=0.0)
    path = output.with_suffix(".training")
    loop = Training(
        modules={"packet": nn.ParameterList([training.vectors])},
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps),
        path=path,
        settings=settings,
        steps=steps,
        every=config.checkpoint_every,
    )
    if not (config.resume and loop.resume()):
        loop.facts["answers"] = [training.answers(parts) for parts in asked]
        loop.save()
    lessons, unseen = (
        [part._replace(response=array("i", answer)) for part, answer in zip(parts, answers, strict=True)]
        for parts, answers in zip(asked, loop.facts["answers"], strict=True)
    )
    for example, parts in zip([*examples, *heldout], [*lessons, *unseen], strict=True):
        training.require_positions(example, parts)
    with stop_on_interrupt() as stop:
        loop.run(partial(training.advance, lessons), on_progress=on_progress, stop=stop)
    header, trailer = torch.tensor_split(training.vectors, [config.header])
    packet = make_packet(header, trailer, weights_digest(model), sink=training.sink, over=config.over)
    before, after = training.measure(unseen, plain=True), training.measure(unseen)
    packet.save(output)
    path.unlink(missing_ok=True)
    return {
        "output": str(config.output),
        "digest": packet.digest.hex(),
        "bytes": output.stat().st_size,
        "header": config.header,
        "trailer": config.trailer,
        "questions": len(lessons),
        "heldout": len(unseen),
        "steps": steps,
        **loop.losses,
        "kl_block": before[0],
        "kl_packet": after[0],
        "agreement_block": before[1],
        "agreement_packet": after[1],
    }


def _examples(config: PacketConfig) -> tuple[list[TrainingExample], list[TrainingExample]]:
    """The questions to learn from, and those to measure with."""
    words = config.prompt
    found = read_examples(config.data, words)
    if config.eval_data is None:
        heldout = found[::_HELDOUT]
        found = [example for index, example in enumerate(found) if index % _HELDOUT]
    else:
        heldout = read_examples(config.eval_data, words)
    if not found:
        raise UsageError(f"{config.data} has one line, which is held out; add more, or give --eval-data.")
    return found, heldout


class PacketTraining:
    """The vectors `(h + t, hidden)` of a packet in training, and their loss.

    Blocks are placed as the engine `block` places them for `model`: with the sink and positions that it recommends.
    """

    def __init__(self, config: PacketConfig, model: LanguageModel) -> None:
        self._config, self._model = config, model
        self._learner = model.with_attention(NAME)
        self._learner.requires_grad_(False)
        recommended = model.checkpoint.recommended.get("sink", "prefix")
        self.sink = recommended if config.sink == "auto" else config.sink
        self._layout: dict[str, Any] = {
            "sink": self.sink,
            "reencode": model.checkpoint.recommended.get("positions") != "kept",
            "over": config.over,
        }
        require_layout(config.over, self.sink, reencode=self._layout["reencode"])
        width = self._learner.get_input_embeddings().weight.shape[1]
        drawn = torch.Generator().manual_seed(config.seed)
        vectors = torch.empty(config.header + config.trailer, width).normal_(0, _STD, generator=drawn)
        self.vectors = nn.Parameter(vectors.to(model.device))

    def steps(self, lessons: int) -> int:
        """The steps of a training on this many questions."""
        rows = self._config.batch * self._config.gradient_accumulation
        return self._config.steps or math.ceil(lessons * self._config.epochs / rows)

    def answers(self, asked: Sequence[ExampleTokens]) -> list[list[int]]:
        """The model's greedy answers under full attention, with the end token if one is generated."""
        found: list[list[int]] = []
        for start in range(0, len(asked), self._config.batch):
            some = asked[start : start + self._config.batch]
            prompts = [[*p.prefix, *(i for chunk in p.chunks for i in chunk), *p.suffix] for p in some]
            sequences = [TokenSequence.over((), position=0) for _ in some]
            answers: list[list[int]] = [[] for _ in some]
            live, given = list(range(len(some))), prompts
            while live:
                best = self._model.step([sequences[i] for i in live], given).argmax(-1).tolist()
                for i, token in zip(live, best, strict=True):
                    answers[i].append(token)
                live = [i for i in live if self._goes_on(answers[i], len(prompts[i]))]
                given = [answers[i][-1:] for i in live]
            found += answers
        return found

    def _goes_on(self, answer: Sequence[int], prompt: int) -> bool:
        most = self._model.max_positions
        room = most is None or prompt + len(answer) < most
        return answer[-1] not in self._model.eos_ids and len(answer) < self._config.answer_tokens and room

    def require_positions(self, example: TrainingExample, parts: ExampleTokens) -> None:
        """UsageError, which names the example, if it is longer with its packets than the model's positions."""
        tokens, most = len(self._row(parts).tokens), self._model.max_positions
        if most is not None and tokens > most:
            raise UsageError(
                f"{example.source}: {tokens} tokens with packets, but model {self._model.checkpoint.name!r} has {most} "
                "positions; shorten the line or leave it out."
            )

    def advance(self, lessons: Sequence[ExampleTokens], step: int) -> dict[str, float]:
        """Add the gradients of a step; the loss per token of its answers."""
        config = self._config
        rows = config.batch * config.gradient_accumulation
        first = step * rows
        some = [lessons[drawn(config.seed, index, len(lessons))] for index in range(first, first + rows)]
        tokens, total = sum(len(parts.response) for parts in some), 0.0
        for start in range(0, rows, config.batch):
            divergence, _ = self._compare(some[start : start + config.batch])
            loss = divergence.sum() / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return {"loss": total}

    @torch.no_grad()
    def measure(self, asked: Sequence[ExampleTokens], *, plain: bool = False) -> tuple[float, float]:
        """The mean over all answer tokens of KL(full ‖ block), and of whether both choose the same; `plain` without a
        packet."""
        found = [
            self._compare(asked[start : start + self._config.batch], plain=plain)
            for start in range(0, len(asked), self._config.batch)
        ]
        divergence, same = (torch.cat(parts) for parts in zip(*found, strict=True))
        return divergence.mean().item(), same.float().mean().item()

    def _compare(self, some: Sequence[ExampleTokens], *, plain: bool = False) -> tuple[Tensor, Tensor]:
        """KL(full ‖ block) `(tokens,)` of each answer token of these examples, and whether both choose the same."""
        with torch.no_grad():
            expected = self.logits([lay_out(parts, block=False) for parts in some]).log_softmax(-1)
        found = self.logits([self._row(parts, plain=plain) for parts in some]).log_softmax(-1)
        divergence = (expected.exp() * (expected - found)).sum(-1)
        return divergence, expected.argmax(-1) == found.argmax(-1)

    def _row(self, parts: ExampleTokens, *, plain: bool = False) -> PackedRow:
        """The row of an example as the engine `block` reads it."""
        if not plain:
            size = self._config.header, self._config.trailer
            around = tuple(array("i", wrap(chunk, *size)) for chunk in parts.chunks if chunk)
            parts = parts._replace(chunks=around)
        return lay_out(parts, block=True, **self._layout)

    def logits(self, rows: Sequence[PackedRow]) -> Tensor:
        """fp32 logits `(tokens, vocab)` for each answer token of these rows, in order."""
        columns: dict[str, Any] = {
            name: value.to(self._model.device) if isinstance(value, Tensor) else value
            for name, value in collate(rows).items()
        }
        found: Tensor = self._learner(
            inputs_embeds=embed(self._learner.get_input_embeddings(), columns["input_ids"], self.vectors),
            position_ids=columns["position_ids"],
            logits_to_keep=columns["logits_to_keep"],
            use_cache=False,
            ragkv_rows=RowMask(columns),
        ).logits
        return found[:, :-1][columns["labels"][:, 1:] != IGNORED].float()
