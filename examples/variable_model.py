"""Train the small model of table apb-3, which answers from long lists of variables, and its retaining heads.

`python examples/variable_model.py` writes examples/variables (about 15 minutes on one core; a stopped run repeats only
its last stage). `python -m ragkv.benchmarks.papers apb-3` then fills the table.

All rows use plain causal attention: the model never sees a block, an anchor or passed tokens. Where a line refers to
another, the model has to name the value at once, so that it resolves lines as it reads them. In half of the rows the
question stands before the list as well, as in an anchor (APB §3.3), and only the family that is asked for has to be
answered. There a second loss asks the first layer's output whether a line is of that family: retaining heads choose in
every layer, and those of the second one, where references are looked up, see no more than this. Rows grow from 64 to
512 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragkv.benchmarks.evaluation.worlds.text import (
    BEGIN,
    FAMILIES,
    MEMBERS,
    TERM,
    VALUES,
    asked,
    referred,
    variable_list,
)
from ragkv.benchmarks.training.loop import save_checkpoint
from ragkv.benchmarks.training.mini.train import COMMON, EMBEDDING_STD, start_induction
from ragkv.benchmarks.training.retaining_heads import RetainingConfig, train_retaining_heads

OUTPUT = Path(__file__).parent / "variables"
END, PAD, UNKNOWN, OTHER = "<end>", "<pad>", "<unk>", "-"
NAMES = tuple(f"{family}{member}" for family in FAMILIES for member in range(MEMBERS))
WORDS = (*BEGIN, OTHER, END, PAD, UNKNOWN, *NAMES, *map(asked, NAMES), *map(referred, NAMES), *VALUES)
IDS = {word: number for number, word in enumerate(WORDS)}
SILENT = -100
"""The label of a token without a target."""
STAGES = ((64, 400), (128, 450), (256, 450), (512, 350))
"""Tokens of a row, and steps."""
STEP_TOKENS = 4096
LR, WARMUP, CLIP = 2e-3, 100, 1.0
HEAD_ROWS, HEAD_STEPS, HEAD_INNER, HEAD_WORDS = 600, 900, 256, 512
HEAD_LR = 3e-3
SEED = 2
"""Of the first weights. With 0 and 1 the model also learns to follow a reference when it is asked, by the first value
that its variable had, and hardly needs these answers while it reads; with 2 it resolves a line as it reads it."""


def row(rng: random.Random, tokens: int) -> tuple[list[int], list[int]]:
    """Ids, and the label of each: the id that the model has to answer next, or `SILENT`."""
    drawn = variable_list(rng, tokens // 2 - 1)
    refers = [line for line in drawn.known if line.refers]
    wanted = rng.choice(refers if refers and rng.random() < 0.7 else drawn.known)
    before = rng.random() < 0.5
    words: list[str] = [asked(wanted.name)] if before else []
    targets: list[str] = [""] if before else []
    words += BEGIN
    targets += [""] * len(BEGIN)
    for line in drawn.lines:
        words += line.text.split()
        if before:
            targets += ["", line.value if line.family in (wanted.family, TERM) else OTHER]
        else:
            targets += ["", line.value if line.refers else ""]
    others = [] if before else rng.sample(drawn.known, min(len(drawn.known), max(1, tokens // 24)))
    for line in (*others, wanted):
        words += [asked(line.name), line.value]
        targets += [line.value, END]
    return [IDS[word] for word in words], [IDS[word] if word else SILENT for word in targets]


def batch(rng: random.Random, size: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels `(size, n)`, filled up on the right."""
    rows = [row(rng, tokens) for _ in range(size)]
    most = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [IDS[PAD]] * (most - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([labels + [SILENT] * (most - len(labels)) for _, labels in rows])


def loss_of(model: LlamaForCausalLM, readout: nn.Linear, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of answers plus that of recognizing lines of the family that the first question asks for."""
    output = model(input_ids=ids, output_hidden_states=True)
    loss = answer_loss(output.logits, ids, labels)
    return loss + family_loss(readout, output.hidden_states[1], ids, labels)


def is_question(ids: torch.Tensor) -> torch.Tensor:
    """Which tokens ask for a variable."""
    return (ids >= IDS[asked(NAMES[0])]) & (ids <= IDS[asked(NAMES[-1])])


def family_loss(readout: nn.Linear, hidden: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Loss of `readout`, which tells from `hidden` `(rows, n, width)` whether lines are of the family asked for first.

    Taken at the content of each line, which follows its name, except for terms, which are common to all families. Both
    answers have equal weight.
    """
    questions = is_question(ids)
    contents = questions[:, :1] & ~questions & (labels != SILENT) & (labels != IDS[END])
    names = (nn.functional.pad(ids[:, :-1], (1, 0)) - IDS[NAMES[0]]) // MEMBERS
    wanted = ((ids[:, :1] - IDS[asked(NAMES[0])]) // MEMBERS).expand_as(ids)
    contents &= names != FAMILIES.index(TERM)
    own = (names == wanted)[contents].float()
    if not own.any():
        return torch.zeros(())
    logits = readout(nn.functional.rms_norm(hidden[contents], hidden.shape[-1:]))[:, 0]
    share = ((own == 0).sum() / own.sum()).clamp(max=30)
    return nn.functional.binary_cross_entropy_with_logits(logits, own, pos_weight=share)


def answer_loss(logits: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss of each kind of target, summed: lines and questions count fully, other lines half, ends a tenth."""
    each = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    questions = is_question(ids).flatten()
    labels = labels.flatten()
    kinds = {
        "other": labels == IDS[OTHER],
        "end": labels == IDS[END],
        "question": questions & (labels != SILENT),
    }
    kinds["line"] = (labels != SILENT) & ~kinds["other"] & ~kinds["end"] & ~kinds["question"]
    weights = {"line": 1.0, "question": 1.0, "other": 0.5, "end": 0.1}
    return torch.stack([weights[kind] * each[which].mean() for kind, which in kinds.items() if which.any()]).sum()


def new_model() -> LlamaForCausalLM:
    """Random weights with a start in the first three layers; a reference is one step, a question about it another."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            rope_theta=1e6,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=IDS[END],
            pad_token_id=IDS[PAD],
        )
    )
    start_induction(model)
    first, second = model.model.layers[1:3]
    second.self_attn.load_state_dict(first.self_attn.state_dict())
    start_question(model)
    return model


def start_question(model: LlamaForCausalLM) -> None:
    """Let layer 0 compare the name before each token with the question's name, if the question stands first.

    Names of a family share a part of their embedding; a question's is its name's plus one common to all questions, and
    references likewise. In layer 0 the second head of each group looks for questions, and writes the same sketch of
    them that the first writes of the token before. The gated feed-forward multiplies both elementwise, so that a flag
    shows how similar they are.
    """
    layer, hidden, width = model.model.layers[0], 128, 32
    attention, feed = layer.self_attn, layer.mlp
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        common = embedding[IDS[PAD] + 1 :].mean(0)
        common = common / common.norm()
        for family in FAMILIES:
            shared = torch.randn(hidden) * EMBEDDING_STD
            for member in range(MEMBERS):
                ids = IDS[f"{family}{member}"]
                own = embedding[ids] - embedding[ids] @ common * common
                embedding[ids] += 0.7 * (own + shared) - own
        asking, referring = (each - each @ common * common for each in torch.randn(2, hidden))
        for word_of, shared in ((asked, asking), (referred, referring)):
            shared *= COMMON * EMBEDDING_STD * hidden**0.5 / shared.norm()
            for name in NAMES:
                embedding[IDS[word_of(name)]] = embedding[IDS[name]] + shared
        direction = asking / asking.norm()
        gain = (8.0 * width**0.5) ** 0.5 / (hidden**0.5 * COMMON / (1 + 2 * COMMON**2) ** 0.5)
        slow = width // 2 - 1  # the pair that turns least
        flag = torch.randn(hidden)
        flag /= flag.norm()
        for head in range(2):
            reads = slice(head * width, (head + 1) * width)
            second = slice((2 * head + 1) * width, (2 * head + 2) * width)
            attention.k_proj.weight[head * width + slow] += gain * direction
            attention.q_proj.weight[(2 * head + 1) * width + slow] += gain * common
            writes = torch.linalg.qr(torch.randn(hidden, width))[0]
            attention.o_proj.weight[:, second] = writes
            before = attention.o_proj.weight[:, slice(2 * head * width, (2 * head + 1) * width)]
            feed.gate_proj.weight[reads] = before.T
            feed.up_proj.weight[reads] = writes.T
            feed.down_proj.weight[:, reads] = 0.05 * flag[:, None]


def new_readout(model: LlamaForCausalLM) -> nn.Linear:
    """A layer that reads the flag of a new model (`start_question`)."""
    readout = nn.Linear(model.config.hidden_size, 1)
    with torch.no_grad():
        flag = model.model.layers[0].mlp.down_proj.weight[:, 0]
        readout.weight[0] = 4 * flag / flag.norm()
        readout.bias.fill_(-2)
    return readout


def train(folder: Path) -> LlamaForCausalLM:
    """The model after all stages, from the last one that was finished."""
    kept = folder / "training.pt"
    model = new_model()
    readout = new_readout(model)
    trained = [*model.parameters(), *readout.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    parts = {"model": model, "readout": readout, "optimizer": optimizer}
    first = 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        first = state["stages"]
    for number, (tokens, steps) in enumerate(STAGES[first:], start=first):
        rng = random.Random(f"variables:{number}")
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LR * (min(1, (step + 1) / WARMUP) if number == 0 else 1)
                if number == len(STAGES) - 1:
                    group["lr"] *= 0.5 * (steps - step) / steps
            loss = loss_of(model, readout, *batch(rng, STEP_TOKENS // tokens, tokens))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            if step % 50 == 49:
                print(f"{tokens} tokens, step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
        save_checkpoint(kept, {name: part.state_dict() for name, part in parts.items()} | {"stages": number + 1})
    kept.unlink(missing_ok=True)
    return model


def save_tokenizer(folder: Path) -> None:
    """Each word is a token; a prompt is its texts alone."""
    found = Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END, pad_token=PAD, unk_token=UNKNOWN)
    whole.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    whole.save_pretrained(folder)


def write_training_data(path: Path) -> None:
    """Write the training data of the heads: lists, and the answers after them.

    In half of the examples a question stands first, and answers about its family follow. In the others the list
    continues with lines that refer to earlier ones, of all families.
    """
    rng = random.Random("variables:heads")
    rows = []
    for number in range(HEAD_ROWS):
        drawn = variable_list(rng, HEAD_WORDS // 2 - 1)
        wanted = rng.choice([line for line in drawn.known if line.refers])
        text = drawn.texts()
        if number % 2:
            text = [asked(wanted.name), *text]
            answers = [f"{asked(line.name)} {line.value}" for line in drawn.known if line.family == wanted.family]
        else:
            answers = [f"{rng.choice(NAMES)} {referred(line.name)}" for line in drawn.known if not line.refers]
        turns = [{"role": "user", "content": asked(wanted.name)}, {"role": "assistant", "content": " ".join(answers)}]
        rows.append({"messages": turns, "documents": [" ".join(text)]})
    path.write_text("\n".join(map(json.dumps, rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model.safetensors").exists():
        train(folder).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    data = folder / "lessons.jsonl"
    write_training_data(data)
    config = RetainingConfig(
        model=str(folder),
        data=data,
        steps=HEAD_STEPS,
        warmup=60,
        lr=HEAD_LR,
        inner=HEAD_INNER,
        pool=1,  # a line is three tokens: five neighbours would make all tokens of a block alike
    )
    result = train_retaining_heads(config)
    data.unlink()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
