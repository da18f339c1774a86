"""Metadata filters: every operator against LlamaIndex's own store, nested groups, and what is refused."""

import itertools

import pytest
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from ragkv.errors import UsageError
from ragkv.integrations.llama_index import RagKVIngest, RagKVQueryEngine, RagKVRetriever
from ragkv.integrations.llama_index.nodes import metadata_filter

METADATA = [
    {"year": 1907, "town": "Varn", "tags": ["old", "pumps"], "share": 0.5},
    {"year": 1950, "town": "varn Bay", "tags": ["pumps"], "share": 1},
    {"year": "1907", "town": "Kesk", "tags": [], "share": 2.25},
    {"year": 10, "town": "", "tags": ["new", "old"], "listed": True},
    {"town": "Kesk Varn", "numbers": [1, 2, 3], "year": None},
    {},
]
VALUES = [
    1907,
    1907.0,
    10,
    0.5,
    "1907",
    "Varn",
    "varn",
    "STRASSE",
    "old",
    "",
    ["old"],
    ["old", "pumps"],
    [1907, 10],
    ["Varn"],
    [],
]
KEYS = ["year", "town", "tags", "share", "numbers", "nothing"]
WHO = "Who founded the works?"


def among(*filters, condition=FilterCondition.AND):
    return MetadataFilters(filters=[*filters], condition=condition)


def having(key, value, operator="=="):
    return MetadataFilter(key=key, value=value, operator=operator)


@pytest.mark.parametrize("operator", list(FilterOperator))
def test_an_operator_is_that_of_llama_indexs_own_store(operator):
    """Where LlamaIndex raises for a chunk, ragkv does not match; a filter that can never match is refused."""
    tried = 0
    for key, value in itertools.product(KEYS, VALUES):
        filters = among(having(key, value, operator))
        try:
            holds = metadata_filter(filters)
        except UsageError:
            continue
        for metadata in [*METADATA, {"town": "Alte Straße"}]:
            try:
                wanted = build_metadata_filter_fn(lambda _, found=metadata: found, filters)("n")
            except TypeError:
                wanted = False
            assert holds(metadata) == wanted, (operator, key, value, metadata)
            tried += 1
    assert tried >= 100


@pytest.mark.parametrize("condition", [*FilterCondition, None])
def test_groups_are_those_of_llama_index(condition):
    parts = [having("year", 1000, ">"), having("town", "Varn", "text_match")]
    for filters in (among(*parts, condition=condition), among(condition=condition)):
        reference = [build_metadata_filter_fn(lambda _, m=m: m, filters) for m in METADATA[:2]]
        assert [metadata_filter(filters)(m) for m in METADATA[:2]] == [match("n") for match in reference]


def test_groups_hold_groups():
    old = among(having("tags", "old", "contains"), having("year", 1900, ">="), condition="or")
    inner = among(old, among(having("town", None, "is_empty"), condition="not"))
    assert [metadata_filter(inner)(m) for m in METADATA] == [True, True, False, False, False, False]
    assert [metadata_filter(among(inner, condition="not"))(m) for m in METADATA[:4]] == [False, False, True, True]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (having("year", "1907", "in"), "'in' takes a list, not '1907'"),
        (having("year", 7, "any"), "takes a list"),
        (having("town", 7, "text_match"), "takes a text"),
        (having("year", [1, 2], ">"), "takes a number or a text"),
        (having("year", None), "is_empty"),
        (having("fused_score", 0.5, ">"), "only has once it was found"),
    ],
)
def test_what_can_mean_nothing_is_refused(part, message):
    with pytest.raises(UsageError, match=message):
        metadata_filter(among(among(part, condition="not")))


@pytest.fixture
def firms(own):
    """Twelve chunks with equal scores, of three documents."""
    source = [{NodeRelationship.SOURCE: RelatedNodeInfo(node_id=f"doc-{i}")} for i in range(3)]
    RagKVIngest(own)(
        [
            TextNode(
                text=f"The works number {i} was founded by Mira Oskel.",
                id_=f"n{i}",
                metadata={"year": 1900 + i, "half": i // 6, "file_name": f"doc-{i % 3}.txt", "page_label": str(i)},
                relationships=source[i % 3],
            )
            for i in range(12)
        ]
    )
    return own


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        (among(having("year", 1907)), {7}),
        (among(having("year", 1909, ">=")), {9, 10, 11}),
        (among(having("half", 1), having("doc_id", "doc-1")), {7, 10}),
        (among(having("document", "doc-2.txt"), having("page", 6, "<")), {2, 5}),
        (among(having("node_id", ["n0", "n4"], "in")), {0, 4}),
        (among(having("source", "DOC-0", "text_match_insensitive")), {0, 3, 6, 9}),
        (among(having("year", "1907")), set()),
    ],
)
def test_the_filter_comes_before_the_best_are_taken(firms, filters, left):
    nodes = RagKVRetriever(firms, similarity_top_k=12, filters=filters).retrieve(WHO)
    assert {n.node_id for n in nodes} == {f"n{i}" for i in left}
    few = RagKVRetriever(firms, similarity_top_k=2, filters=filters).retrieve(WHO)
    assert [n.node_id for n in few] == [n.node_id for n in nodes[:2]]


def test_the_engine_filters_and_says_when_nothing_is_left(firms):
    late = among(having("year", 1910, ">"))
    response = RagKVQueryEngine(firms, engine="block", similarity_top_k=3, filters=late).query(WHO)
    assert [n.node_id for n in response.source_nodes] == ["n11"]
    assert str(RagKVQueryEngine(firms, filters=among(having("year", 7))).query(WHO)) == "Empty Response"
    narrow = RagKVRetriever(
        firms, filters=late, search={"where": ("file_name=doc-2.txt",), "only": lambda _, c: c.ordinal > 0}
    )
    assert [n.node_id for n in narrow.retrieve(WHO)] == ["n11"]
    with pytest.raises(UsageError, match="No document matches"):
        RagKVRetriever(firms, filters=late, search={"where": ("file_name=none.txt",)}).retrieve(WHO)


def test_settings_may_change_afterwards_as_in_llama_index(firms):
    retriever = RagKVRetriever(firms, top_k=5)
    retriever.similarity_top_k = 1
    retriever.filters = among(having("year", 1900, ">"))
    assert (retriever.top_k, len(retriever.retrieve(WHO))) == (1, 1)
    with pytest.raises(UsageError, match="similarity_top_k must be"):
        retriever.similarity_top_k = 0
    with pytest.raises(UsageError, match="takes LlamaIndex's MetadataFilters, not dict"):
        retriever.filters = {"year": 1907}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 2, "similarity_top_k": 2}, "two names of one setting"),
        ({"similarity_top_k": 0}, "similarity_top_k must be a whole number from 1 up, not 0"),
        ({"top_k": True}, "top_k must be a whole number"),
        ({"similarity_top_k": "3"}, "not '3'"),
        ({"filters": [having("year", 1907)]}, "takes LlamaIndex's MetadataFilters"),
        ({"search": {"mode": "dense"}}, "search does not take 'mode'"),
        ({"llm": None}, r"does not take llm: the index's own model"),
        ({"vector_store_query_mode": "hybrid"}, r"the search is set by search="),
        ({"doc_ids": ["a"]}, 'filter by the key "doc_id"'),
        ({"similarity": 3}, r"does not take 'similarity'; it takes rag, .*similarity_top_k, filters"),
    ],
)
@pytest.mark.parametrize("kind", [RagKVRetriever, RagKVQueryEngine])
def test_what_is_not_honoured_is_refused(rag, kind, options, message):
    for make in (lambda: kind(rag, **options), lambda: kind.from_index(rag.folder, device="cpu", **options)):
        with pytest.raises(UsageError, match=message):
            make()


def test_a_foreign_retriever_has_settings_of_its_own(rag):
    for name, value in {"top_k": 2, "similarity_top_k": 2, "filters": among(), "search": {}}.items():
        with pytest.raises(UsageError, match=f"{name} is for ragkv's own retriever"):
            RagKVQueryEngine(rag, retriever=RagKVRetriever(rag), **{name: value})
