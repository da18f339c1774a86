"""What the server answers by OpenAI's chat protocol, for its OpenAPI description."""

from __future__ import annotations

from pydantic import BaseModel

from ragkv.server.reply import AnswerSource

__all__ = ["ChatReply", "ModelFacts", "ModelListing"]


class ModelFacts(BaseModel):
    """An index, or an index with an engine."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelListing(BaseModel):
    object: str
    data: list[ModelFacts]


class Citation(BaseModel):
    url: str
    title: str
    start_index: int
    end_index: int


class Annotation(BaseModel):
    type: str
    url_citation: Citation


class Said(BaseModel):
    role: str
    content: str
    refusal: None
    annotations: list[Annotation]


class Choice(BaseModel):
    index: int
    message: Said
    logprobs: None
    finish_reason: str


class CachedTokens(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatReply(BaseModel):
    """An answer that is not streamed, with the chunks that it is made from."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: None
    choices: list[Choice]
    usage: Usage
    sources: list[AnswerSource]
