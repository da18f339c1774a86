"""Answers by stored chunks inside vLLM are `block`'s, alone and in a crowd, and no other request meets their KV."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllmserver import QUESTIONS, body_of, far, references, vllm_server

from ragkv.errors import RagkvError

FAMILIES = {"llama": "prefixed", "qwen3": "standalone", "stablelm": "prefixed", "smollm2": "prefixed"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
GUIDANCE = ("--structured-outputs-config.backend", "guidance")


@pytest.fixture(scope="module", params=FAMILIES.items(), ids=lambda family: family[0])
def served(request, serving):
    family, over = request.param
    with serving(family, *GUIDANCE, over=over) as setup:
        yield setup


def test_log_probabilities_are_those_of_block(served):
    differences = []
    for number in range(6):
        full, block, whole = references(served, number)
        body = body_of(served, number)
        served.vllm.forget()
        _, scores, cached = served.vllm.complete(body)
        assert (cached, far(scores, block) < 1e-4) == (whole, True)
        differences.append(far(scores, full))
        _, scores, cached = served.vllm.complete({"model": body["model"], "prompt": body["prompt"]})  # no salt
        assert (cached, far(scores, full) < 1e-4) == (0, True)
    assert max(differences) > 0.1  # what the two engines differ by


@pytest.mark.parametrize("salt", [None, "another", "ragkv-another"])
def test_no_other_request_meets_the_kv_of_stored_chunks(served, salt):
    body = body_of(served, 1)
    full, block, whole = references(served, 1)
    served.vllm.forget()
    for _ in range(2):  # loaded, then from the prefix cache
        assert far(served.vllm.complete(body)[1], block) < 1e-4
    for number in range(2):  # what it computed itself may be met again
        _, scores, cached = served.vllm.complete({**body, "cache_salt": salt})
        assert far(scores, full) < 1e-4
        assert number or cached == 0
    assert served.vllm.complete(body)[2] == whole


def test_forty_requests_together_are_answered_as_each_alone(serving):
    few = ("--num-gpu-blocks-override", "48", "--max-num-batched-tokens", "64", "--enable-chunked-prefill")
    with serving("llama", *few, "--max-num-seqs", "64", "--max-model-len", "1024") as served:
        bodies = [body_of(served, number) for number in range(12)]
        requests = []
        for number in range(40):
            body = bodies[number % 12]
            requests.append(body if number % 4 else {"model": body["model"], "prompt": body["prompt"]})
        alone = []
        for body in requests:
            served.vllm.forget()
            alone.append(served.vllm.complete(body, 64))
        assert served.vllm.metric("vllm:num_preemptions_total") == 0
        served.vllm.forget()
        with ThreadPoolExecutor(40) as threads:
            together = list(threads.map(lambda body: served.vllm.complete(body, 64), requests))
        assert served.vllm.metric("vllm:num_preemptions_total") > 0
        for mine, theirs in zip(alone, together, strict=True):
            assert mine[0] == theirs[0]
            for before, after in zip(mine[1], theirs[1], strict=True):
                assert max(abs(score - after[token]) for token, score in before.items() if token in after) < 1e-4


@pytest.mark.parametrize("engine", ["full", "block", "single"])
def test_answers_are_those_of_ragkv_itself(served, engine):
    """By blocks of 32 tokens nearly the same context: greedy answers of `full` and `single` must be equal."""
    options = {"engine": engine, "top_k": 3, "max_new_tokens": 12}
    mine, theirs = (rag.query(QUESTIONS[0], **options) for rag in (served.own, served.rag))
    assert engine == "block" or [t.token_id for t in mine.trace] == [t.token_id for t in theirs.trace]
    assert theirs.engine == engine
    assert not theirs.kv.misses


@pytest.mark.parametrize(
    ("decoding", "form"),
    [
        ({"regex": "[0-9]{3}x"}, "[0-9]{3}x"),
        ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"schema": json.dumps(SCHEMA)}, None),
    ],
    ids=["regex", "grammar", "schema"],
)
def test_vllm_holds_answers_to_schemas_regexes_and_grammars(served, decoding, form):
    answer = served.rag.query(QUESTIONS[0], engine="block", top_k=2, max_new_tokens=200, decoding=decoding)
    assert answer.finish_reason == "stop"
    if form is None:
        assert json.loads(answer.text)["a"] in ("x", "y")
    else:
        assert re.fullmatch(form, answer.text)


def test_a_model_that_was_not_proved_is_refused_by_name(models, tmp_path):
    with pytest.raises(RagkvError, match="vLLM did not start"), vllm_server(tmp_path, models("gemma2"), tmp_path):
        pass
    assert "RagKVConnector does not serve sliding windows" in (tmp_path / "vllm.log").read_text()
