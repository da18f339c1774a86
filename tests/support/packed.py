"""What is asked in a packed training row, read back from its tokens and weights."""

from ragkv.benchmarks.mini.data import GOLD_WEIGHT

__all__ = ["spoken"]


def spoken(tokenizer, sample):
    """Of every question: itself, its answer, what of the answer weighs nothing and what weighs as gold."""
    found = []
    for segment in sorted({s for s, asks in zip(sample.segments, sample.asks, strict=True) if asks}):
        row = [i for i, s in enumerate(sample.segments) if s == segment]
        question, answer = tokenizer.decode([sample.tokens[i] for i in row]).split("<|end|>\n<|assistant|>\n")
        message = row[-len(tokenizer(answer, add_special_tokens=False)["input_ids"]) :]
        unlearned = tokenizer.decode([sample.tokens[i] for i in message if sample.weights[i] == 0])
        gold = tokenizer.decode([sample.tokens[i] for i in message if sample.weights[i] == GOLD_WEIGHT])
        found.append((question.removeprefix("Question: "), answer.removesuffix("<|end|>"), unlearned, gold))
    return found
