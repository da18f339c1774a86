"""A spec is read as it is written, and errors quote what cannot be read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.errors import UsageError
from ragkv.evaluation.io import Spec, parse_specs


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("full", [Spec("full")]),
        (" full , ape,,full", [Spec("full"), Spec("ape")]),
        ("pced(gamma=0, beta=shared)", [Spec("pced", {"gamma": 0, "beta": "shared"})]),
        ("pced(beta=0.5),pced()", [Spec("pced", {"beta": 0.5}), Spec("pced")]),
        ("block(preset=no-positions)", [Spec("block", {"preset": "no-positions"})]),
        (
            'mapreduce(instruction="Say (a, b) = \\"c\\"\\n")',
            [Spec("mapreduce", {"instruction": 'Say (a, b) = "c"\n'})],
        ),
        ('ape(prompt.system="", wide=true)', [Spec("ape", {"prompt.system": "", "wide": True})]),
    ],
)
def test_specs(text, found):
    assert parse_specs(text) == found


@pytest.mark.parametrize("text", ["", " , ", "pced(gamma=1", "pced)", "pced(gamma)", 'x(a="b)', "x(a=1, a=2)", "a b"])
def test_what_is_no_spec_is_quoted(text):
    with pytest.raises(UsageError) as raised:
        parse_specs(text)
    assert repr(text)[1:-1].strip() in str(raised.value)


VALUES = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text())


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=4))
def test_a_spec_is_read_as_it_is_shown(options):
    assert parse_specs(f"x,{Spec('engine', options)}")[1] == Spec("engine", options)
