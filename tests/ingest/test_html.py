import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import read

from ragkv.ingest.html import read_html
from ragkv.ingest.parser import Unreadable

INTRO = "<h1>Guide</h1><p>Some words that stand above all of this.</p>"


def page(body: str, outside: str = "") -> str:
    return f"<html><head><title>T</title></head><body>{outside}<main>{INTRO}{body}</main></body></html>"


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("CO<sub>2</sub> and H<sub>2</sub>O", "CO2 and H2O"),
        (
            "the <b>E</b>uropean plan, Euro<b>pean</b>, Euro<span class=x>pe</span>an",
            "the European plan, European, European",
        ),
        ("<mark>keyword</mark>s, <a href='/x'>link</a>s", "keywords, links"),
        ("10<sup>5</sup> tonnes, 10<sup>−3</sup>, the 1<sup>st</sup>", "10^5 tonnes, 10^−3, the 1st"),
        ("a mill<sup><a href='#n'>1</a></sup> of oats", "a mill 1 of oats"),
        ("Donau&shy;dampf<wbr>schiff\u00adfahrt", "Donaudampfschifffahrt"),
        ("a <b>whole</b> word", "a **whole** word"),
        ("<i>a</i><b>b</b>c", "abc"),
    ],
)
def test_markup_inside_of_words_goes(tmp_path, markup, text):
    source = read(tmp_path, "a.html", page(f"<p>It reads {markup}.</p>"))
    assert source.text.rpartition("\n\n")[2] == f"It reads {text}."
    assert source.left_out == ()


@pytest.mark.parametrize(
    "heading",
    [
        'Install<a class="headerlink" href="#install" title="Permalink">¶</a>',
        '<a id="x" class="anchor" href="#install"></a>Install',
        'Install<a class="hash-link" href="#install">\u200b</a>',
        '<a href="#install">Install</a> <a href="#install">#</a>',
        'Install<span class="mw-editsection">[<a href="/edit">edit</a>]</span>',
    ],
)
def test_permalinks_are_no_part_of_a_heading(tmp_path, heading):
    source = read(tmp_path, "a.html", page(f"<h2>{heading}</h2><p>Run it.</p>"))
    assert [section.heading for section in source.sections] == ["Guide", "Guide > Install"]


CODE = "# comment\nrun --x\n\n## two"


@pytest.mark.parametrize(
    "markup",
    [
        f"<pre>{CODE}</pre>",
        f"<pre><code>{CODE}</code></pre>",
        f'<div class="highlight"><pre><span></span><span class="c1">{CODE}</span></pre></div>',
        f"<pre>{CODE}</pre>".replace("\n", "<br>"),
        '<table class="highlighttable"><tr><td class="linenos"><div><pre>1\n2\n3\n4</pre></div></td>'
        f'<td class="code"><div class="highlight"><pre>{CODE}\n</pre></div></td></tr></table>',
        f'<table><tbody><tr><td class="rouge-gutter gl"><pre>1\n2</pre></td><td><pre>{CODE}</pre></td></tr></table>',
    ],
)
def test_code_is_code_and_holds_no_headings(tmp_path, markup):
    source = read(tmp_path, "a.html", page(f"<p>Before.</p>{markup}<h2>After</h2><p>End.</p>"))
    assert f"```\n{CODE}\n```" in source.text
    assert [section.heading for section in source.sections] == ["Guide", "Guide > After"]
    assert source.left_out == ()


def test_code_in_a_list_leaves_the_headings_after_it(tmp_path):
    """The extractor joined a fence to the line before it, so its end began a block."""
    item = f"<dl><dt>--point</dt><dd><p>it is the</p><pre>{CODE}</pre><p>or <code>run\n--x</code> it.</p></dd></dl>"
    source = read(tmp_path, "a.html", page(f"{item}<ul><li>one<pre>{CODE}</pre></li></ul><h2>After</h2><p>End.</p>"))
    assert source.text.count(f"\n```\n{CODE}\n```\n") == 2
    assert [section.heading for section in source.sections] == ["Guide", "Guide > After"]


def test_a_line_of_text_that_begins_with_a_hash_is_no_heading(tmp_path):
    source = read(
        tmp_path, "a.html", page("<p>One<br># two<br>## three</p><table><tr><td>a<pre># b</pre>c</td></tr></table>")
    )
    assert [section.heading for section in source.sections] == ["Guide"]
    assert "three" in source.text
    assert source.left_out == ()


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        (f"<html><body>{INTRO}</body></html>late<p>later</p>", "late\nlater"),
        (f"<html><body>{INTRO}</body></html><html><body><p>Second.</p></body></html>", "Second."),
        (
            page("<table><tr><th>a</th><th>b</th></tr><tr><td>c<ul><li>d</li><li>e</li></ul></td></tr></table>"),
            "| c d e |",
        ),
        (page("<table><tr><td>x</td><td><dl><dt>y</dt><dd>z</dd></dl></td></tr></table>"), "| x | y z |"),
        (page("<details><summary><h2>More</h2></summary><p>d</p></details>"), "all of this.\n\n## More\n\nd"),
    ],
)
def test_text_after_the_end_of_a_page_and_in_unusual_places(tmp_path, markup, text):
    source = read(tmp_path, "a.html", markup)
    assert " ".join(text.split()) in " ".join(source.text.split())
    assert source.left_out == ()


def test_a_hint_for_browsers_without_scripts_does_not_count(tmp_path):
    source = read(
        tmp_path, "a.html", "<html><body><main><h1>A</h1><p>t</p><noscript>Enable all of JS</noscript></main>"
    )
    assert ([section.heading for section in source.sections], source.text) == (["A"], "# A\n\nt")
    assert read(tmp_path, "b.html", "<html><body><noscript>Enable JS</noscript></body></html>").text == "Enable JS"


def test_what_is_outside_of_the_main_text_is_named(tmp_path):
    outside = "<nav><a href='/'>Home</a> <a href='/p'>Products</a></nav><script>var x</script><style>p {}</style>"
    source = read(tmp_path, "a.html", page("<p>See <img src='mill.png' alt='the mill'> it.</p>", outside))
    assert list(source.left_out) == ["pictures (the mill)", "outside of the main text (Home Products)"]
    source = read(tmp_path, "c.html", f"<nav>Home</nav><main>{INTRO}<p>Run.</p></main>")  # no whole page
    assert source.left_out == ("outside of the main text (Home)",)
    many = " ".join(f"w{number}" for number in range(150))
    [left_out] = read(tmp_path, "b.html", page("<p>Run.</p>", f"<nav>{many}</nav>")).left_out
    assert left_out.endswith("w99 … and 50 more words)")


BLOCKS = (
    "p div h2 h3 blockquote li td dt dd figcaption address summary label button option caption th section aside nav"
)
BLOCKS = [*BLOCKS.split(), "footer", "header", "form", "article", "pre", "center", "noscript", "textarea", "fieldset"]
WRAP = {"li": "ul", "td": "tr", "th": "tr", "dt": "dl", "dd": "dl", "figcaption": "figure", "summary": "details"}
WRAP |= {"option": "select", "caption": "table", "tr": "table"}


@given(st.integers(0, 1 << 32), st.booleans())
def test_every_word_of_a_page_is_in_its_text_or_left_out(seed, whole):
    rng, words = random.Random(seed), []

    def some() -> str:
        words.append(f"w{rng.randrange(10**6)}")
        kind = rng.choice(["{}", "<b>{}</b>", "<a href='/x'>{}</a>", "<code>{}</code>", "{}<br>", "<span>{}</span>"])
        return kind.format(words[-1])

    def block(depth: int) -> str:
        name = rng.choice(BLOCKS)
        inside = " ".join(
            some() if depth > 2 or rng.random() < 0.7 else block(depth + 1) for _ in range(rng.randint(1, 4))
        )
        text = f"<{name}>{inside}</{name}>"
        while name in WRAP:
            name = WRAP[name]
            text = f"<{name}>{text}</{name}>"
        return text + (f" {some()} " if rng.random() < 0.2 else "")

    html = "".join(block(0) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.8:  # else a fragment, as mail has
        html = f"<html><head><title>T</title></head><body>{html}</body></html>"
    try:
        parsed = read_html(html.encode(), whole=whole)
    except Unreadable:  # nothing is silent then
        return
    everything = f"{parsed.text} {parsed.left_out}"
    assert [word for word in words if word not in everything] == []
