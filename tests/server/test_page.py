"""The page in a real browser, against one live server: what users do with it, and what documents must not do to it.

After each test, the browser has reported no error, no violation of the content security policy, and no request to
another host.
"""

import copy
import re
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from heldmodel import HeldModel
from indexed import write_texts
from live import live

from ragkv import Decoding, RagKV
from ragkv.index.batch import AsyncAnswerStream
from ragkv.ingest import from_bytes
from ragkv.server.settings import Keys

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parents[2] / "examples" / "corpus"
QUESTION = "How many people work at Linodyne Paper?"
HOPS = "In which town is the company that makes Ranatix?"
EVIL = "<img src=x onerror=alert(1)>.md"
EVIL_TEXT = (
    "# <script>alert(2)</script>\n\nThe gremlin is called Zorvath. [look](javascript:alert(3)) "
    "<img src=x onerror=alert(4)> <script>alert(5)</script> <a href='javascript:alert(6)'>here</a>\n"
)
WIDE, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
VIEWS = [
    pytest.param(("light", WIDE), id="light"),
    pytest.param(("dark", WIDE), id="dark", marks=pytest.mark.nightly),
    pytest.param(("light", PHONE), id="phone", marks=pytest.mark.nightly),
    pytest.param(("dark", PHONE), id="dark-phone", marks=pytest.mark.nightly),
]

EXECUTABLE = Path("/usr/bin/chromium")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
PATIENCE = 120_000
"""Milliseconds after which a waiting test fails."""


@contextmanager
def chromium():
    """A browser. While it is open, this thread has a running event loop, so `asyncio.run` fails."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
    if not EXECUTABLE.exists():
        pytest.skip(f"needs {EXECUTABLE}: apt-get install chromium")
    sync_api.expect.set_options(timeout=PATIENCE)
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=EXECUTABLE, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page in a separate browser profile. `faults` collects what no page may do: errors, dialogs, requests to other
    hosts.
    """

    def __init__(self, browser, root, **settings):
        self.faults = []
        self.context = browser.new_context(**settings)
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.page.on("console", self._message)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", self._asked)
        self.page.on("popup", lambda popup: self.faults.append(f"popup: {popup.url}"))
        self.page.on("request", lambda request: self._fetched(request.url, root))

    def _message(self, message):
        if message.type in ("error", "warning"):  # violations of the policy are reported as errors
            self.faults.append(f"{message.type}: {message.text}")

    def _asked(self, dialog):
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _fetched(self, url, root):
        if not url.startswith(f"{root}/"):
            self.faults.append(f"request: {url}")


@pytest.fixture(scope="module")
def rag(tmp_path_factory):
    """mini over a few documents, one of which contains scripts."""
    with RagKV.create(tmp_path_factory.mktemp("indexes") / "corpus", model="mini", device="cpu") as made:
        made.ingest(CORPUS / "product-catalogue.pdf", CORPUS / "companies" / "linodyne-paper.md")
        made.ingest(CORPUS / "companies" / "pelophor-press.md", from_bytes(EVIL_TEXT.encode(), name=EVIL))
        yield made


@pytest.fixture(scope="module")
def server(rag, key):
    """The index and a read-only copy of it; a key is required."""
    shelf = shutil.copytree(rag.folder, rag.folder.parent / "shelf")
    other = RagKV.open(shelf, device="cpu", readonly=True)
    with live({"corpus": rag, "shelf": other}, keys=Keys.read(key[0])) as serving:
        yield serving


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def forgiven():
    """The error statuses that a test expects, each of which Chromium reports as an error."""
    return set()


@pytest.fixture
def blameless(forgiven):
    """Check after the test that these visits have no faults."""
    trackers = []
    yield trackers
    expected = tuple(f"status of {status} " for status in forgiven)
    for tracker in trackers:
        assert [fault for fault in tracker.faults if not any(each in fault for each in expected)] == []


@pytest.fixture(scope="module")
def profile_of(browser, server):
    """A browser profile with an empty page: `profile_of(key, color_scheme=…)`. With a query in its address, the page
    starts with empty storage.
    """
    with ExitStack() as profiles:

        def made(key, **settings):
            tracker = Watched(browser, server.root, **{"viewport": WIDE, **settings})
            profiles.callback(tracker.context.close)
            if key is not None:
                tracker.context.add_init_script(
                    "if (location.search) {"
                    " localStorage.clear(); sessionStorage.clear(); history.replaceState(null, '', '/'); }"
                    f" sessionStorage.setItem('ragkv-key', {key!r})"
                )
            return tracker

        yield made


@pytest.fixture
def visit_of(profile_of, server, blameless):
    """The server's page in a new profile: `visit_of(key, color_scheme=…)`."""

    def visited(key, **settings):
        tracker = profile_of(key, **settings)
        blameless.append(tracker)
        tracker.page.goto(f"{server.root}/")
        return tracker

    return visited


@pytest.fixture(scope="module", params=VIEWS)
def tracker(request, profile_of, key):
    """A profile that tests reuse."""
    scheme, viewport = request.param
    return profile_of(key[1], color_scheme=scheme, viewport=viewport)


@pytest.fixture
def page(tracker, server, blameless):
    """The page, reloaded."""
    tracker.faults.clear()
    blameless.append(tracker)
    tracker.page.goto(f"{server.root}/?anew")
    return ready(tracker.page)


def shown(locator):
    from playwright.sync_api import expect

    return expect(locator)


def until(page, condition, *arguments):
    """Wait until a JavaScript function holds, frame by frame; `expect` polls and is up to 0.5 s slower."""
    waited = f"""([most, ...given]) => new Promise((done) => {{
        setTimeout(done, most);
        const look = () => ({condition})(...given) ? done(true) : requestAnimationFrame(look);
        look();
    }})"""
    assert page.evaluate(waited, [PATIENCE, *arguments]), condition


def ready(page):
    until(page, "() => document.querySelector('#listing tr') && document.activeElement.id === 'question'")
    return page


def enter(page, question=QUESTION):
    page.get_by_label("Question").fill(question)
    page.keyboard.press("Enter")


@contextmanager
def settings(page):
    """The panel of settings, while it is open."""
    page.get_by_role("button", name="Settings").click()
    panel = page.get_by_role("dialog", name="Settings")
    yield panel
    page.keyboard.press("Escape")
    shown(panel).to_be_hidden()


def ask(page, question, *, engine=None, top_k=None, answers=1):
    """Ask a question and wait for all answers; returns the turn's element."""
    if engine is not None or top_k is not None:
        with settings(page) as panel:
            if engine is not None:
                panel.get_by_label("Engine").first.select_option(engine)
            if top_k is not None:
                panel.get_by_label("Passages to read").first.fill(str(top_k))
    enter(page, question)
    return answered(page, question, answers=answers)


def answered(page, question, *, answers=1):
    """The last turn, when it has all answers to this question."""
    until(
        page,
        """(question, answers) => {
            const turn = [...document.querySelectorAll(".turn")].at(-1);
            const asked = turn?.querySelector(".asked").textContent;
            return asked === question && turn.querySelectorAll(".total").length === answers
                && document.getElementById("stop").hidden;
        }""",
        question,
        answers,
    )
    return page.locator(".turn").last


def unfolded(result):
    """What an answer says about its making, unfolded."""
    result.get_by_role("button", name="How this answer was made").first.click()
    return result.locator(".told").first


def talks(page):
    return page.locator(".talk-open")


def drop(page, *files):
    """Drop files, given as pairs of name and text, onto the page."""
    carried = page.evaluate_handle(
        "files => { const t = new DataTransfer();"
        " for (const [name, text] of files) t.items.add(new File([text], name)); return t; }",
        [list(file) for file in files],
    )
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event("body", event, {"dataTransfer": carried})


def words_of(text):
    """The words of Markdown."""
    return re.findall(r"\w+", text)


def words(locator):
    return words_of(locator.inner_text())


def focused(page):
    return page.locator(":focus")


def tab_to(page, selector, *, back=False):
    """Press Tab until an element that matches `selector` has the focus."""
    for _ in range(60):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if page.evaluate("s => document.activeElement.matches(s)", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def rgb(text):
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (part / 255 for part in colour)]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    """The contrast ratio of WCAG 2."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_what_the_model_thinks_is_folded(page, rag, monkeypatch):
    tokens = copy.copy(rag.model.tokens)
    vars(tokens).pop("thought", None)
    monkeypatch.setattr(tokens, "_tokenizer", copy.deepcopy(tokens._tokenizer))
    tokens._tokenizer.chat_template = f"{tokens._tokenizer.chat_template or ''}{{# </think> #}}"
    monkeypatch.setattr(rag.model, "tokens", tokens)
    monkeypatch.setattr(rag.index, "config", replace(rag.config, decoding=Decoding(thinking=6, regex="[ab]{3}")))
    expected = rag.query(QUESTION)
    result = ask(page, QUESTION)
    shown(result.locator(".text")).to_have_text(expected.text)
    shown(result.locator(".thought")).to_be_hidden()
    result.locator("summary", has_text="Thinking").click()
    shown(result.locator(".thought")).to_have_text(expected.reasoning)


def test_it_streams_and_can_be_stopped(page, rag, monkeypatch):
    whole = rag.query(QUESTION, engine="full").text
    held = HeldModel(rag, monkeypatch, last=5)
    with settings(page) as panel:
        panel.get_by_label("Engine").select_option("full")
    enter(page)
    shown(page.get_by_label("Question")).to_have_value("")
    shown(page.get_by_label("Question")).to_be_focused()
    text = page.locator(".turn .text")
    shown(text).to_have_text(re.compile(r"\w"))
    shown(text).to_have_attribute("aria-busy", "true")
    assert whole.startswith(text.text_content())
    assert text.text_content() != whole
    shown(page.locator(".source")).not_to_have_count(0)
    shown(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    shown(page.locator(".turn .state")).to_have_text("Stopped")
    assert held.cancelled.wait(600)
    shown(page.get_by_role("button", name="Ask", exact=True)).to_be_visible()
    shown(talks(page)).to_have_count(0)  # it is not part of a conversation


def test_the_focus_is_in_the_field_when_a_button_is_gone(page, rag, monkeypatch):
    """A key that is still held on it neither stops the answer nor asks again."""
    held = HeldModel(rag, monkeypatch, last=5)
    page.get_by_label("Question").fill(QUESTION)
    page.get_by_role("button", name="Ask", exact=True).focus()
    for name in ("Stop", "Ask"):
        page.keyboard.down("Enter")
        shown(page.get_by_label("Question")).to_be_focused()
        page.keyboard.down("Enter")  # is held, so it repeats
        page.keyboard.up("Enter")
        shown(page.get_by_role("button", name=name, exact=True)).to_be_visible()
        if name == "Stop":
            page.get_by_role("button", name=name).focus()
    shown(page.locator(".turn")).to_have_count(1)
    assert held.cancelled.wait(600)


def test_a_source_opens_in_its_document_with_the_passage_marked(page, rag):
    expected = rag.query(HOPS, engine="pced", top_k=2)
    result = ask(page, HOPS, engine="pced", top_k=2)
    cards = result.locator(".source")
    shown(cards).to_have_count(2)
    for place, source in enumerate(expected.sources):
        shown(cards.nth(place).locator(".source-open")).to_have_text(source.title)
        shown(cards.nth(place).locator(".scores")).to_be_hidden()
        shown(cards.nth(place).locator(".score")).to_have_text(f"score {source.score:.3f}")
        shown(cards.nth(place).locator(".scores")).to_contain_text(f"bm25 {source.stages['bm25']:.2f}")
    unfolded(result)
    shown(cards.first.locator(".scores")).to_be_visible()
    cards.nth(1).locator(".source-open").click()
    reader = page.get_by_role("dialog", name=expected.sources[1].document)
    marked = reader.locator(".marked")
    assert words(marked) == words_of(expected.sources[1].text)
    shown(marked).to_be_focused()
    shown(marked).to_be_in_viewport()
    chunk = rag.store.chunk(expected.sources[1].chunk_id)
    shown(reader.locator(".block")).to_have_count(len(list(rag.store.chunks(chunk.document_id))))
    page.keyboard.press("Escape")
    shown(reader).to_be_hidden()


@pytest.mark.nightly
def test_a_long_document_opens_around_the_passage(page, rag):
    rag.ingest(from_bytes(b"".join(b"## Part %d\n\nWord %d is here.\n\n" % (n, n) for n in range(150)), name="long.md"))
    ask(page, "Word 100 is here?", top_k=1).locator(".source-open").click()
    text = page.locator("#reader-text")
    shown(text.locator(".marked")).to_contain_text("Word 100 is here.")
    shown(text).not_to_contain_text("Word 0 is here.")
    text.get_by_role("button", name="Show what stands before").click()
    shown(text).to_contain_text("Word 0 is here.")
    shown(text.get_by_role("button", name="Show what stands before")).to_have_count(0)
    text.get_by_role("button", name="Show more").click()
    shown(text).to_contain_text("Word 149 is here.")
    shown(focused(page)).to_have_class("block")
    assert [int(n) for n in re.findall(r"Word (\d+) is here", text.inner_text())] == list(range(150))
    rag.delete("stdin:long.md")


def test_pced_shows_the_expert_that_won_each_token(page, rag):
    expected = rag.query(HOPS, engine="pced", top_k=3)
    won = [source.tokens_won for source in expected.sources]
    assert sum(1 for count in won if count) == 2, "two documents are needed for this answer"
    result = ask(page, HOPS, engine="pced", top_k=3)
    assert result.locator(".text").text_content() == expected.text
    tokens = result.locator(".token")
    visible = [token for token in expected.trace if token.text]
    assert tokens.count() == len(visible)
    for place, token in enumerate(visible):
        shown(tokens.nth(place)).to_have_attribute("data-expert", str(token.source + 1))
        shown(tokens.nth(place)).to_have_class(re.compile(rf"\bx{token.source + 1}\b"))
    first = visible[0].source
    shown(tokens.first).to_have_attribute("title", f"{first + 1}: {expected.sources[first].title}")
    fills = {token.evaluate("t => getComputedStyle(t).backgroundColor") for token in tokens.all()}
    assert len(fills) == 2
    legend = result.get_by_role("group", name="Experts").get_by_role("button")
    payload = [f"{place + 1}{source.title}{won[place]}" for place, source in enumerate(expected.sources) if won[place]]
    assert legend.all_text_contents() == payload
    dots = [result.locator(f".trace circle.x{place + 1}").count() for place in range(3)]
    assert dots == won
    unfolded(result)
    shown(result.get_by_role("img")).to_have_attribute("aria-label", re.compile(f"expert 1 won {won[0]} tokens"))
    legend.nth(1).click()
    shown(result.locator(".token.faint").first).to_have_attribute("data-expert", "1")
    shown(result.locator(".token.faint[data-expert='2']")).to_have_count(0)
    legend.nth(1).click()
    shown(result.locator(".token.faint")).to_have_count(0)


def test_the_sentence_that_an_answer_stands_on_is_marked(page, rag):
    """Not the whole passage; in a table, in its row."""
    marks = ask(page, QUESTION).locator(".source").first.locator("mark")
    shown(marks).to_contain_text(["360"])
    sentence = marks.first.inner_text()
    page.locator(".turn .source-open").first.click()
    shown(page.locator("#reader mark").first).to_have_text(sentence)
    shown(page.locator("#reader mark").first).to_be_in_viewport()
    assert len(words(page.locator("#reader .marked"))) > 2 * len(words_of(sentence))
    page.keyboard.press("Escape")
    table = b"# Fair\n\n| Day | Place |\n|---|---|\n| Zorday | Quimhall |\n| Nilday | Perrin |\n\n**Rain** falls there."
    rag.ingest(from_bytes(table, name="fair.md"))
    menu(page)
    page.get_by_role("button", name="New conversation").click()
    source = ask(page, "Where is the fair on Zorday?", top_k=1).locator(".source-text")
    shown(source.locator("td")).to_have_text(["Zorday", "Quimhall", "Nilday", "Perrin"])
    shown(source.locator("td mark")).to_have_text(["Zorday", "Quimhall"])
    shown(source.locator("strong")).to_have_text("Rain")
    rag.delete("stdin:fair.md")


def test_small_talk_gets_a_reply_and_a_summary_needs_no_search(page, rag):
    ask(page, QUESTION)
    for message in ("Hello!", "thanks"):
        result = ask(page, message)
        shown(result.locator(".text")).to_have_text(rag.query(message).text)
        shown(result.locator(".right")).to_be_hidden()
        shown(unfolded(result)).to_contain_text("nothing was searched")
    result = ask(page, "Summarise linodyne-paper.md")
    shown(result.locator("strong").first).to_have_text("Linodyne Paper")
    shown(result.locator(".source")).not_to_have_count(0)


def test_an_index_is_made_chosen_filled_and_asked(visit_of, key, server, forgiven):
    forgiven.add(409)
    page = ready(visit_of(key[1]).page)
    dialog = page.get_by_role("dialog", name="New index")
    for name in ("corpus", "fresh"):
        page.get_by_role("button", name="New index").click()
        dialog.get_by_label("Name").fill(name)
        page.keyboard.press("Enter")
        shown(dialog).to_be_hidden()
        if name == "corpus":
            shown(page.get_by_role("alert")).to_contain_text("choose another name")
    shown(page.get_by_label("Index", exact=True)).to_have_value("fresh")
    shown(page.locator("#files")).to_be_focused()
    shown(page.get_by_role("alert")).to_be_hidden()
    drop(page, ("kesk.md", "# Kesk Mills\n\nKesk Mills employs 4711 people."))
    shown(page.locator("#listing tr", has_text="kesk.md")).to_be_visible()
    page.get_by_role("link", name="Ask").click()
    shown(ask(page, "How many people work at Kesk Mills?").locator(".text")).to_contain_text("4711")
    page.get_by_label("Index", exact=True).select_option("corpus")
    shown(page.locator(".turn")).to_have_count(0)
    talks(page).first.click()  # a conversation brings its index with it
    shown(page.get_by_label("Index", exact=True)).to_have_value("fresh")
    shown(page.locator(".turn")).to_have_count(1)


def conversed(rag, question, *turns, **options):
    """`ragkv chat`'s answer to a question after these turns."""
    conversation = rag.conversation()
    for asked, answer in turns:
        conversation.add(asked, answer)
    return rag.query(conversation.ask(question, **options)).text


def test_the_conversation_is_sent_along_unless_it_is_turned_off(page, rag):
    """It is used as in `ragkv chat`; the button and a change of index start a new one."""
    first, second, third = QUESTION, "Who founded it?", "In which town is it?"
    message = [conversed(rag, first)]
    message.append(conversed(rag, second, (first, message[0])))
    message.append(conversed(rag, third, (first, message[0]), (second, message[1])))
    alone = rag.query(second).text
    assert message[1] != alone, "the conversation matters"
    for question, text in zip((first, second, third), message, strict=True):
        result = ask(page, question)
        shown(result.locator(".text")).to_have_text(text)
        shown(result.locator(".right")).to_have_attribute("open", "")
    shown(page.locator(".asked")).to_have_text([first, second, third])
    shown(page.locator(".right[open]")).to_have_count(1)  # the sources of old turns are folded
    shown(unfolded(result)).to_contain_text("after 2 questions of this conversation")
    page.get_by_label("Question").focus()
    tab_to(page, "#anew", back=True)
    page.keyboard.press("Enter")
    shown(page.get_by_label("Question")).to_be_focused()
    shown(page.locator("#status")).to_have_text("A new conversation begins.")
    shown(page.locator(".turn")).to_have_count(0)
    shown(ask(page, second).locator(".text")).to_have_text(alone)
    with settings(page) as panel:
        panel.get_by_label("Send the conversation along").uncheck()
    result = ask(page, second)
    shown(result.locator(".text")).to_have_text(alone)
    shown(unfolded(result)).not_to_contain_text("of this conversation")
    page.get_by_label("Index", exact=True).select_option("shelf")
    shown(page.locator(".turn")).to_have_count(0)


def test_an_answer_is_made_again_in_its_own_place(page, rag):
    """With other settings by these, with the same ones by sampling; earlier turns stay."""
    ask(page, QUESTION)
    result = ask(page, HOPS)
    with settings(page) as panel:
        panel.get_by_label("Engine").select_option("full")
    result.get_by_role("button", name="Regenerate").click()
    result = answered(page, HOPS)
    shown(page.locator(".asked")).to_have_text([QUESTION, HOPS])
    shown(unfolded(result)).to_contain_text("engine full")
    shown(result.locator(".told")).not_to_contain_text("seed")
    shown(page.locator(".turn").first.get_by_role("button", name="Regenerate")).to_be_hidden()
    result.get_by_role("button", name="Regenerate").click()
    shown(unfolded(answered(page, HOPS))).to_contain_text("seed")
    ready_again(page)
    shown(page.locator(".asked")).to_have_text([QUESTION, HOPS])


def test_an_empty_page_says_what_it_is_for_and_offers_questions(page, rag):
    samples = page.locator("#samples button")
    questions = rag.sample_questions()
    assert len(questions) == 3
    shown(samples).to_have_text(questions)
    shown(page.get_by_text("Ask about the 4 documents in corpus")).to_be_visible()
    samples.first.click()
    result = answered(page, questions[0])
    shown(result.locator(".text")).to_have_text(rag.query(questions[0]).text)
    shown(page.locator("#welcome")).to_be_hidden()
    shown(page.get_by_label("Question")).to_be_focused()


def test_conversations_are_there_after_a_reload(page, rag):
    """At the side, each with its answers, under its name; the user can delete one."""
    town = "In which town is the company?"
    message = ask(page, QUESTION).locator(".text").text_content()
    assert page.evaluate("() => sessionStorage.getItem('ragkv-conversations-1')")
    assert page.evaluate("() => Object.keys(localStorage)") == []  # it is kept only as long as the key
    ask(page, HOPS, engine="pced", top_k=3)
    menu(page)
    page.get_by_role("button", name="New conversation").click()
    ask(page, town, engine=rag.config.default_engine, top_k=rag.config.top_k)
    shown(talks(page)).to_have_text([town, QUESTION])
    ready_again(page)
    shown(page.locator(".asked")).to_have_text([town])
    menu(page)
    talks(page).get_by_text(QUESTION).click()
    shown(page.locator(".asked")).to_have_text([QUESTION, HOPS])
    shown(page.locator(".text").first).to_have_text(message)
    last = page.locator(".turn").last
    turns = [(QUESTION, rag.query(QUESTION).text)]
    turns.append((HOPS, conversed(rag, HOPS, *turns, engine="pced", top_k=3)))
    assert last.locator(".text").text_content() == turns[1][1]
    shown(last.locator(".token")).not_to_have_count(0)
    shown(last.locator(".source")).to_have_count(3)
    last.locator(".source-open").first.click()
    shown(page.locator("#reader .marked")).to_be_focused()
    page.keyboard.press("Escape")
    menu(page)
    page.get_by_role("button", name=f"Rename {QUESTION}").click()
    page.get_by_role("dialog").get_by_label("Name").fill("<b>Linodyne</b>")
    page.keyboard.press("Enter")
    shown(talks(page)).to_have_text(["<b>Linodyne</b>", town])
    shut(page)
    result = ask(page, "Who founded the company?")
    shown(result.locator(".text")).to_have_text(conversed(rag, "Who founded the company?", *turns))
    ready_again(page)
    shown(page.locator(".talk-open[aria-current]")).to_have_text("<b>Linodyne</b>")
    shown(page.locator(".asked")).to_have_count(3)
    menu(page)
    page.get_by_role("button", name="Delete <b>Linodyne</b>").click()
    page.get_by_role("dialog", name="Delete this conversation?").get_by_role("button", name="Delete").click()
    shown(page.locator(".turn")).to_have_count(0)
    ready_again(page)
    shown(talks(page)).to_have_text([town])


def menu(page):
    """Open the list of conversations where it is a drawer."""
    if page.locator("#menu").is_visible():
        page.locator("#menu").click()
        shown(page.locator("#side-close")).to_be_focused()


def shut(page):
    """Close the drawer."""
    if page.locator("#side-close").is_visible():
        page.keyboard.press("Escape")
        shown(page.locator("#menu")).to_be_focused()


def test_a_question_that_is_typed_before_the_indexes_are_known_stays(page):
    held = []

    def hold(route):
        held.append(route)

    page.route("**/api/indexes", hold)
    page.reload()
    enter(page)
    while not held:
        page.wait_for_timeout(10)
    held[0].continue_()
    page.unroute("**/api/indexes")
    ready(page)
    shown(page.get_by_label("Question")).to_have_value(QUESTION)
    page.keyboard.press("Enter")
    shown(page.locator(".turn .text")).to_contain_text("360")


BREAKS = """() => {
    const piece = new TextEncoder().encode('event: sources\\ndata: {"sources": []}\\n\\n');
    window.whole = window.fetch;
    window.fetch = async () => new Response(new ReadableStream({
        pull: (out) => (out.begun ? out.error(new TypeError("network error")) : out.enqueue(piece), (out.begun = true)),
    }));
}"""
"""Connections break after the first event, as when a server is killed."""


AWAY = "window.whole = window.fetch; window.fetch = async () => { throw new TypeError('Failed to fetch'); };"
BACK = "window.fetch = window.whole;"


def test_a_page_that_does_not_reach_the_server_begins_when_it_answers(profile_of, server, key, blameless):
    """Before, it offers nothing that needs an index."""
    tracker = profile_of(key[1])
    blameless.append(tracker)
    page = tracker.page
    page.add_init_script(AWAY)
    page.goto(f"{server.root}/#documents")
    shown(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    shown(page.locator("#files, #choose-folder, #filter").locator("visible=true")).to_have_count(0)
    page.evaluate(f"() => {{ {BACK} }}")
    shown(page.locator("#listing tr")).not_to_have_count(0)
    shown(page.get_by_role("alert")).to_be_hidden()
    shown(page.get_by_label("Filter by name")).to_be_visible()


def test_an_answer_that_breaks_off_says_so_and_its_question_outlives_a_reload(page):
    page.evaluate(BREAKS)
    enter(page)
    state = page.locator(".answer.failed .state")
    shown(state).to_have_text("The connection broke before the answer was complete.")
    page.evaluate("() => { window.fetch = window.whole; }")
    page.get_by_label("Question").fill("Typed meanwhile")
    for index in ("shelf", "corpus"):
        page.get_by_label("Index", exact=True).select_option(index)
    shown(page.get_by_label("Question")).to_have_value("Typed meanwhile")
    ready_again(page)
    shown(page.get_by_label("Question")).to_have_value(QUESTION)
    ready_again(page)
    shown(page.get_by_label("Question")).to_have_value("")


def test_a_conversation_that_is_too_long_for_the_browser_loses_its_oldest_turns(page):
    ask(page, QUESTION)
    page.evaluate(
        """() => {
            const [talk] = JSON.parse(sessionStorage.getItem("ragkv-conversations-1"));
            const turn = JSON.stringify(talk.turns[0]).length;
            let filled = "";
            for (let more = 1 << 22; more; more >>= 1) {
                const next = filled + "x".repeat(more);
                try { sessionStorage.setItem("filled", next); filled = next; } catch {}
            }
            sessionStorage.setItem("filled", filled.slice(0, -2.5 * turn));
        }"""
    )
    asked = [QUESTION, *(f"{number}. {QUESTION}" for number in range(6))]
    for question in asked[1:]:
        ask(page, question)
        until(page, "() => document.getElementById('stop').hidden")
        (talk,) = page.evaluate("JSON.parse(sessionStorage.getItem('ragkv-conversations-1'))")
        assert question == talk["turns"][-1]["question"]
    assert 1 < len(talk["turns"]) < len(asked)
    ready_again(page)
    shown(page.locator(".asked").last).to_have_text(asked[-1])


def test_what_another_tab_adds_to_a_conversation_is_not_overwritten(page):
    ask(page, QUESTION)
    page.evaluate(
        """() => {
            const [talk] = JSON.parse(sessionStorage.getItem("ragkv-conversations-1"));
            talk.turns.push({ ...talk.turns[0], question: "Elsewhere?" });
            sessionStorage.setItem("ragkv-conversations-1", JSON.stringify([talk]));
        }"""
    )
    for question in (HOPS, "Who founded the company?"):  # the second time, what is kept is this tab's own
        ask(page, question)
    kept = page.evaluate("JSON.parse(sessionStorage.getItem('ragkv-conversations-1'))")
    questions = [[turn["question"] for turn in talk["turns"]] for talk in kept]
    assert questions == [[QUESTION, HOPS, "Who founded the company?"], [QUESTION, "Elsewhere?"]]


def test_kept_conversations_that_cannot_be_read_do_no_harm(page):
    for kept in ("{", "null", '[3, {"index": "corpus"}, {"id": "1", "index": "gone", "turns": []}]'):
        page.evaluate("kept => sessionStorage.setItem('ragkv-conversations-1', kept)", kept)
        ready_again(page)
        shown(page.get_by_label("Question")).to_be_focused()
    shown(ask(page, QUESTION).locator(".text")).to_contain_text("360")


def ready_again(page):
    page.reload()
    return ready(page)


def test_an_answer_says_how_long_it_took_and_cites_its_sources(page, rag):
    with settings(page) as panel:
        panel.get_by_label("Send the conversation along").uncheck()
    for engine in ("full", "pced"):
        expected = rag.query(QUESTION, engine=engine)
        place = next(n for n, source in enumerate(expected.sources) if "360" in source.text)
        result = ask(page, QUESTION, engine=engine)
        shown(result.get_by_role("button", name="How this answer was made")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
        unfolded(result)
        shown(page.locator("#status")).to_contain_text(f"Answer: {expected.text}")
        for term in ("search", "load KV", "first token", "total"):
            shown(result.locator("dt", has_text=term)).to_have_count(1)
        shown(result.locator(".trace")).to_have_count(1 if engine == "pced" else 0)
        if engine == "pced":
            result.get_by_role("button", name="Experts’ colours").click()
            shown(result.locator(".token")).to_have_count(0)
        shown(result.locator(".text")).to_have_text(expected.text)
        cite = result.locator(".text").get_by_role("button")
        shown(cite).to_have_accessible_name(f"Source {place + 1}: {expected.sources[place].title}")
        cite.click()
        shown(page.locator("#reader .marked")).to_contain_text("360")
        page.keyboard.press("Escape")


def test_a_refusal_is_not_coloured(page, rag):
    question = "When was Ostra Steel founded?"
    expected = rag.query(question, engine="pced")
    assert expected.text == "The documents do not say."
    result = ask(page, question, engine="pced")
    shown(result.locator(".text")).to_have_text(expected.text)
    shown(result.locator("summary", has_text="passages read")).to_be_visible()
    for part in (".token", ".cite", ".traced", ".trace", ".legend button:visible"):
        shown(result.locator(part)).to_have_count(0)


@pytest.fixture
def says(monkeypatch):
    """Make every answer end with this text: `says(text)`."""
    finished = AsyncAnswerStream.answer.fget

    def payload(text):
        answer = property(lambda stream: replace(finished(stream), text=text))
        monkeypatch.setattr(AsyncAnswerStream, "answer", answer)

    return payload


MARKDOWN = """1998. It was a year.

## Towns

1. **Linodyne Paper** employs 360 people.
2. `b < c`

| company | people |
| --- | --- |
| Linodyne Paper | 360 |

```sh
echo "a" && [31m <b>
```
"""


def test_an_answer_is_shown_as_markdown_and_copied_as_it_is(page, says):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    says(MARKDOWN.strip())
    result = ask(page, QUESTION)
    text = result.locator(".text")
    shown(text.locator("p").first).to_have_text("1998. It was a year.")
    shown(text.get_by_role("heading", name="Towns", level=5)).to_be_visible()
    shown(text.locator("li")).to_have_text(["Linodyne Paper employs 360 people.", "b < c"])
    shown(text.locator("strong")).to_have_text("Linodyne Paper")
    shown(text.locator("td")).to_have_text(["Linodyne Paper", "360"])
    shown(text.locator("li .cite, td .cite")).to_have_count(2)
    shown(text.locator("pre .cite, pre b")).to_have_count(0)
    shown(text.locator("pre")).to_have_text('echo "a" && \ufffd[31m <b>')
    read = "() => navigator.clipboard.readText()"
    text.get_by_role("button", name="Copy the code").click()
    shown(page.locator("#status")).to_have_text("Copied")
    assert page.evaluate(read) == 'echo "a" && \ufffd[31m <b>\n'
    page.evaluate("() => { document.getElementById('status').textContent = ''; }")
    result.get_by_role("button", name="Copy the answer").click()
    shown(page.locator("#status")).to_have_text("Copied")
    assert page.evaluate(read) == MARKDOWN.strip().replace("\x1b", "\ufffd")
    page.get_by_label("Question", exact=True).fill("")
    result.get_by_role("button", name=f"Edit: {QUESTION}").click()
    shown(focused(page)).to_have_value(QUESTION)


def test_json_has_a_line_for_each_value_and_instructions_go_along(page, rag, monkeypatch, says):
    monkeypatch.setattr(rag.index, "config", replace(rag.config, decoding=Decoding(schema='{"const": 1}')))
    says('{"a": [12345678901234567890, {}], "b": "x: {y}"')  # a number that JavaScript cannot represent; truncated JSON
    with settings(page) as panel:
        panel.get_by_label("Instructions").fill("Be brief.")
    shown(page.get_by_role("button", name="Settings changed")).to_be_visible()
    result = ask(page, QUESTION)
    lines = ["{", '  "a": [', "    12345678901234567890,", "    {}", "  ],", '  "b": "x: {y}"']
    assert result.locator("pre").text_content().splitlines() == lines
    shown(unfolded(result)).to_contain_text("as told: Be brief.")


HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(2)</script><svg onload=alert(3)><style>*{display:none}</style>",
    "[a](javascript:alert(4)) [b](  JaVaScRiPt:alert(5)) [c](data:text/html,<b>) <javascript:alert(6)>",
    "![x](http://elsewhere.invalid/pixel?secret) ![y](//elsewhere.invalid/y) ![z](data:image/svg+xml,<svg>)",
    "[name]: http://elsewhere.invalid/\n[name] <a href=x onclick=alert(7)>x</a> <form action=//elsewhere.invalid>",
    "```<img src=x onerror=alert(8)>\n<script>alert(9)</script>\n```\n[fine](https://elsewhere.invalid/ 'title')",
    "\x1b]0;title\x07\x1b[2J\u202ecba\ue0000\ue001\ue00099\ue001 `\ue0001\ue001`",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=alert(10)&gt;'>",
    "> " * 5000 + "x\n" + "- " * 5000 + "[" * 5000 + "*a_" * 5000 + "`" * 5001 + "|" * 5000,
    "<b>word</b> **bold**\n\n" * 20_000,
]


def test_hostile_answers_do_nothing(page, says):
    for place, text in enumerate(HOSTILE):
        says(text)
        result = ask(page, f"{QUESTION} {place}")
        shown(result.get_by_role("button", name="Copy the answer")).to_be_visible()
        assert what_no_answer_has(page) == ([], set()), text[:99]
    ready_again(page)  # the stored copy does nothing either
    shown(page.locator(".turn .text")).to_have_count(len(HOSTILE))
    assert what_no_answer_has(page) == ([], set())


def what_no_answer_has(page):
    """Elements and attributes of the shown answers that Markdown never produces, and control characters."""
    result = page.evaluate(
        """() => [...document.querySelectorAll(".md, .md *:not(button *)")].flatMap((node) => [
            ...(/^(DIV|P|BR|STRONG|EM|S|CODE|PRE|BLOCKQUOTE|UL|OL|LI|HR|TABLE|THEAD|TBODY|TR|TH|TD|A|H[456]|BUTTON|MARK)$/
              .test(node.tagName) ? [] : [node.tagName]),
            ...[...node.attributes].filter(({ name }) => /^(on|style|src|id)/.test(name)).map(({ name }) => name),
            ...(node.href && !/^(https?|mailto):/.test(node.href) ? [node.href] : []),
            ...(node.href && node.rel !== "noopener noreferrer nofollow" ? [node.rel] : [])])"""
    )
    return result, set("".join(page.locator(".turn .text").all_text_contents())) & set("\x1b\x07\u202e\ue000\ue001")


def test_each_engine_has_a_line_of_help_and_some_are_folded_away(page):
    with settings(page) as panel:
        engine, message = panel.get_by_label("Engine").first, panel.locator(".lane-help").first
        offered = engine.locator("option")
        names = offered.all_text_contents()
        assert {"ape", "block", "full", "pced"} <= set(names)
        assert "single" not in names
        panel.get_by_label("Also offer").check()
        names = offered.all_text_contents()
        assert "single" in names
        lines = set()
        for name in names:
            engine.select_option(name)
            lines.add(message.text_content())
        assert len(lines) == len(names)
        assert all(line.endswith(".") and "\n" not in line for line in lines)
        engine.select_option("single")
        panel.get_by_label("Also offer").uncheck()
        shown(engine).to_have_value("single")  # the selection is kept
        panel.get_by_role("button", name="Compare another setting").click()
        shown(panel.get_by_label("Engine").nth(1)).to_have_value("single")
    shown(page.get_by_role("button", name="Comparing 2 settings")).to_be_visible()


def test_settings_are_compared_side_by_side(page, rag):
    with settings(page) as panel:
        panel.get_by_label("Engine").select_option("pced")
        compare = panel.get_by_role("button", name="Compare another setting")
        for engine, top_k in (("ape", 2), ("full", 1)):
            compare.click()
            lane = panel.locator(".lane").last
            shown(lane.get_by_label("Engine")).to_be_focused()
            lane.get_by_label("Engine").select_option(engine)
            lane.get_by_label("Passages to read").fill(str(top_k))
        panel.get_by_role("button", name="Remove setting 1").click()
    result = ask(page, QUESTION, answers=2)
    rows = result.locator("tbody tr")
    heads = result.locator(".answer-head")
    for place, (engine, top_k) in enumerate((("ape", 2), ("full", 1))):
        answer = rag.query(QUESTION, engine=engine, top_k=top_k)
        shown(heads.nth(place)).to_have_text(f"{place + 1}. {engine} · top {top_k} · bm25")
        shown(result.locator(".text").nth(place)).to_have_text(answer.text)
        shown(result.locator(".answer").nth(place).locator(".source")).to_have_count(top_k)
        shown(rows.nth(place)).to_have_text(re.compile(rf"{engine} · top {top_k} · bm25.* m?s.* m?s"))
        shown(rows.nth(place).locator(".cell-bar")).to_have_count(2)


def test_what_cannot_be_asked_is_told_in_its_place(page, forgiven):
    forgiven.add(400)
    with settings(page) as panel:
        panel.get_by_label("Only where").fill("nonsense")
    enter(page)
    shown(page.locator(".answer.failed .state")).to_contain_text("nonsense")


def test_a_wrong_setting_is_shown_where_it_is_folded_away(page):
    with settings(page) as panel:
        panel.get_by_label("Seed").fill("-1")
    enter(page)
    shown(page.get_by_label("Seed")).to_be_focused()
    shown(page.locator(".turn")).to_have_count(0)
    shown(page.get_by_label("Question")).to_have_value(QUESTION)


def test_a_question_that_is_cut_says_so(page):
    page.get_by_label("Question").focus()
    page.keyboard.insert_text("x" * 30_000)
    field = page.locator("#question")
    assert field.evaluate("field => field.validationMessage") == (
        "The question was cut: it can have at most 20,000 characters."
    )
    page.keyboard.press("Backspace")
    assert len(field.input_value()) == 20_000
    assert field.evaluate("field => field.validationMessage") == ""


def test_what_is_typed_from_right_to_left_is_shown_so(page):
    for name in ("question", "system", "where", "filter", "rename-field"):
        field = page.locator(f"#{name}")
        field.evaluate("field => { field.value = 'כמה עובדים?'; }")
        assert field.evaluate("field => getComputedStyle(field).direction") == "rtl", name


def test_a_text_is_dropped_into_a_field(page):
    """Only files are kept from the browser, which would leave the page for them."""
    prevented = """type => {
        const carried = new DataTransfer();
        if (type === "Files") carried.items.add(new File(["x"], "x.unknown"));
        else carried.setData(type, "x");
        const over = new DragEvent("dragover", { dataTransfer: carried, bubbles: true, cancelable: true });
        return !document.getElementById("question").dispatchEvent(over);
    }"""
    assert [page.evaluate(prevented, type) for type in ("text/plain", "Files")] == [False, True]


def test_an_upload_that_is_under_way_stays_in_the_list(page):
    page.get_by_role("link", name="Documents").click()
    page.route("**/documents", lambda route: None)
    for count in range(10):
        page.locator("#files").set_input_files({"name": f"{count}.txt", "mimeType": "text/plain", "buffer": b"One."})
        page.get_by_role("button", name=f"Cancel {count}.txt").wait_for()
    for count in range(10):
        page.get_by_role("button", name=f"Cancel {count}.txt").click()
    shown(page.locator(".job.over").first).to_contain_text("Cancelled before it was sent")
    page.unroute("**/documents")


def test_files_are_dropped_watched_asked_about_and_deleted(page, rag):
    page.evaluate(
        "() => { window.states = []; new MutationObserver(() =>"
        " window.states.push(document.querySelector('#jobs .job-state')?.textContent))"
        ".observe(document.getElementById('jobs'), {subtree: true, childList: true, characterData: true}); }"
    )
    drop(page, ("kesk.md", "# Kesk Mills\n\nKesk Mills employs 4711 people."), ("broken.pdf", "%PDF-no"))
    shown(page.locator("#documents")).to_be_visible()
    shown(page.locator("#veil")).to_be_hidden()
    job = page.locator(".job").first
    shown(job.locator(".job-state")).to_contain_text("1 added, 1 left out")
    shown(job.locator(".job-detail")).to_contain_text("broken.pdf: ")
    assert any(state.startswith("Sending") for state in page.evaluate("window.states"))
    row = page.locator("#listing tr", has_text="kesk.md")
    shown(row).to_be_visible()
    page.get_by_role("link", name="Ask").click()
    result = ask(page, "How many people work at Kesk Mills?")
    shown(result.locator(".text")).to_contain_text("4711")
    page.get_by_role("link", name="Documents").click()
    row.get_by_role("button", name="Delete kesk.md").click()
    dialog = page.get_by_role("dialog", name="Delete this document?")
    dialog.get_by_role("button", name="Keep it").click()
    shown(row).to_be_visible()
    row.get_by_role("button", name="Delete kesk.md").click()
    dialog.get_by_role("button", name="Delete").click()
    shown(row).to_have_count(0)
    shown(focused(page)).to_have_class("source-open")
    assert rag.store.document("stdin:kesk.md") is None


def test_folders_are_chosen_and_dropped_and_a_file_replaces_its_document(page, rag, tmp_path):
    """Files keep their paths; hidden files are skipped; more than the server takes at once are sent in parts."""
    stored = {"kesk.md": "Kesk Mills employs 4711 people.", "deep/varn.md": "Varn Docks."}
    write_texts(tmp_path / "notes", {**stored, ".git/config": "No.", "deep/.env": "No."})
    page.get_by_role("link", name="Documents").click()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a folder").click()
    chooser.value.set_files(tmp_path / "notes")
    shown(page.locator(".job-state").first).to_contain_text("2 added")
    page.evaluate(
        "() => { const file = (name, text) => ({isFile: true, fullPath: `/notes/${name}`,"
        " file: (done) => done(new File([text], name))}); let left = ["
        " file('kesk.md', 'Kesk Mills employs 4712 people.'), file('.hidden', 'No.'),"
        " ...Array.from({length: 64}, (_, at) => file(`${at}.txt`, at < 63 ? '' : 'Last.'))];"
        " DataTransferItem.prototype.webkitGetAsEntry = () => ({createReader: () =>"
        " ({readEntries: (done) => done(left.splice(0, 40))})}); }"
    )
    drop(page, ("notes", ""))
    shown(page.locator(".job-name").first).to_have_text("notes/63.txt, part 2 of 2")
    shown(page.locator(".job-state").first).to_contain_text("1 added")
    shown(page.locator(".job-state").nth(1)).to_contain_text("1 replaced, 63 left out")
    names = {
        name for each in rag.list_documents().documents if (name := each.document.document_id).startswith("stdin:n")
    }
    assert names == {f"stdin:notes/{name}" for name in (*stored, "63.txt")}
    assert rag.store.text("stdin:notes/kesk.md") == "Kesk Mills employs 4712 people."
    for name in names:
        rag.delete(name)


def test_an_upload_that_waits_is_cancelled(page, rag, held):
    try:
        page.get_by_role("link", name="Documents").click()
        page.locator("#files").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"One."})
        assert held.begun.wait(600)
        first = page.locator(".job", has_text="a.txt").first  # the latest
        shown(first.locator("progress")).to_have_attribute("aria-label", "Progress of a.txt")
        shown(first.locator(".job-state")).to_have_text("Encoding, 0 %")
        page.locator("#files").set_input_files({"name": "b.txt", "mimeType": "text/plain", "buffer": b"Two."})
        second = page.locator(".job", has_text="b.txt").first
        shown(second.locator(".job-state")).to_have_text("Waiting for its turn")
        second.get_by_role("button", name="Cancel b.txt").click()
        shown(second.locator(".job-state")).to_have_text("Cancelled")
        page.reload()  # a reload shows the running jobs
        shown(first.locator(".job-state")).to_have_text("Encoding, 0 %")
    finally:
        held.go.set()
    shown(first.locator(".job-state")).to_contain_text("1 added")
    assert rag.store.document("stdin:b.txt") is None
    rag.delete("stdin:a.txt")


def test_the_last_of_more_documents_have_the_focus(page):
    """The button that shows them goes away."""

    def respond(route):
        after = "after=" in route.request.url
        names = ("c", "d") if after else ("a", "b")
        facts = {"title": None, "chunks": 1, "text_bytes": 1, "kv_bytes": 1, "ingested_at": 0}
        found = [{"document_id": name, "source": name, **facts} for name in names]
        route.fulfill(json={"documents": found, "next": None if after else "b"})

    page.route("**/documents?*", respond)
    page.get_by_role("link", name="Documents").click()
    page.get_by_label("Filter by name").fill("*")
    page.get_by_role("button", name="Show more").focus()
    page.keyboard.press("Enter")
    shown(focused(page)).to_have_text("c")
    page.unroute("**/documents?*")


def test_an_index_that_cannot_be_listed_shows_no_other_ones_documents(page, forgiven):
    """They would be opened, and deleted, as those of the chosen one."""
    forgiven.add(503)
    page.get_by_role("link", name="Documents").click()
    page.route("**/shelf/documents?*", lambda route: route.fulfill(status=503, body="{}"))
    page.get_by_label("Index", exact=True).select_option("shelf")
    shown(page.get_by_role("alert")).to_have_text("The server answered 503.")
    shown(page.locator("#listing")).to_have_text("")
    shown(page.locator("#counted")).to_have_text("")
    page.unroute("**/shelf/documents?*")


def test_indexes_that_are_chosen_in_quick_succession_alarm_nobody(page):
    page.get_by_label("Index", exact=True).select_option("shelf")
    page.route("**/corpus/jobs", lambda route: None)  # still under way when another index is chosen
    for index in ("corpus", "shelf"):
        with page.expect_request("**/documents?*"):
            page.get_by_label("Index", exact=True).select_option(index)
    until(page, "() => document.querySelector('#listing tr')")
    shown(page.get_by_role("alert")).to_be_hidden()
    page.unroute("**/corpus/jobs")


def test_a_server_that_has_no_index_left_is_told(page):
    page.route("**/api/indexes", lambda route: route.fulfill(json={"indexes": []}))
    page.reload()
    shown(page.get_by_role("alert")).to_contain_text("cannot read any of its indexes")
    page.unroute("**/api/indexes")


@pytest.mark.nightly
def test_another_index_is_chosen(page):
    page.get_by_label("Index", exact=True).select_option("shelf")
    shown(page.get_by_label("Question")).to_have_attribute("placeholder", "Ask shelf")
    result = ask(page, QUESTION)
    shown(result.locator(".text")).to_contain_text("360")
    page.get_by_role("link", name="Documents").click()
    shown(page.get_by_text("This index is read-only here")).to_be_visible()
    shown(page.locator("#adding")).to_be_hidden()
    shown(page.locator("#listing tbody tr")).not_to_have_count(0)
    shown(page.get_by_role("button", name="Delete")).to_have_count(0)


def test_dark_and_light_follow_the_system_and_the_switch(visit_of, key):
    page = ready(visit_of(key[1], color_scheme="dark").page)
    paper = "() => getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(paper)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(paper)
    assert luminance(rgb(dark)) < 0.1
    assert luminance(rgb(light)) > 0.8
    switch = page.get_by_role("button", name="Colours")
    switch.click()
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(paper) == light
    switch.click()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(paper) == dark
    page.reload()
    shown(switch).to_have_accessible_name("Colours: dark")
    assert page.evaluate(paper) == dark
    ink = "() => getComputedStyle(document.body).color"
    assert luminance(rgb(page.evaluate(ink))) > 0.7
    page.emulate_media(media="print")  # on white, in any case
    assert luminance(rgb(page.evaluate(ink))) < 0.1
    shown(page.locator("#asking")).to_be_hidden()


@pytest.mark.nightly
def test_text_on_the_colours_of_experts_can_be_read_and_they_differ(visit_of, key):
    page = ready(visit_of(key[1]).page)
    read = """() => Array.from({length: 10}, (_, n) => {
      const token = document.createElement("span");
      token.className = `token x${n + 1} turn-over`;
      document.getElementById("results").append(token);
      const style = getComputedStyle(token);
      return [style.backgroundColor, style.borderBottomColor, style.color, getComputedStyle(document.body).color];
    })"""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        paper = rgb(page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor"))
        colours = [[rgb(each) for each in token] for token in page.evaluate(read)]
        for fill, edge, ink, _ in colours:
            assert contrast(fill, ink) >= 7, (scheme, fill)
            assert contrast(edge, paper) >= 3, (scheme, edge)  # a graphic, by WCAG 1.4.11
        for one, other in combinations([token[1] for token in colours], 2):
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) >= 60, (scheme, one, other)


def test_everything_can_be_done_by_keyboard(visit_of, key):
    page = ready(visit_of(key[1]).page)
    shown(page.get_by_label("Question")).to_be_focused()
    tab_to(page, "#to-settings")
    page.keyboard.press("Enter")
    tab_to(page, ".lane select")
    page.keyboard.type("pced")
    page.keyboard.press("Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    shown(page.get_by_role("button", name="Settings: pced · top 2 · bm25")).to_be_focused()
    page.keyboard.press("/")
    page.keyboard.type(QUESTION)
    page.keyboard.press("Enter")
    result = answered(page, QUESTION)
    shown(result.locator(".source")).to_have_count(2)
    tab_to(page, ".expert", back=True)
    page.keyboard.press("Space")
    shown(focused(page)).to_have_attribute("aria-pressed", "true")
    tab_to(page, ".source-open")
    page.keyboard.press("Enter")
    shown(page.locator("#reader .marked")).to_be_focused()
    page.keyboard.press("Escape")
    shown(page.locator("#reader")).to_be_hidden()
    shown(result.locator(".source-open").first).to_be_focused()
    tab_to(page, "#to-documents", back=True)
    page.keyboard.press("Enter")
    tab_to(page, "#files")
    tab_to(page, "#listing .plain")
    page.keyboard.press("Enter")
    shown(page.get_by_role("button", name="Keep it")).to_be_focused()
    page.keyboard.press("Escape")
    shown(page.locator("#confirm")).to_be_hidden()
    page.keyboard.press("/")
    shown(page.get_by_label("Question")).to_be_focused()


def test_a_phone_needs_no_scrolling_to_the_side(visit_of, key):
    page = ready(visit_of(key[1], viewport=PHONE).page)
    fits = "() => document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    with settings(page) as panel:
        panel.get_by_role("button", name="Compare another setting").click()
        panel.locator(".lane").last.get_by_label("Engine").select_option("full")
        assert panel.evaluate("panel => panel.scrollWidth <= innerWidth")
    result = ask(page, HOPS, engine="pced", answers=2)
    unfolded(result)
    assert page.evaluate(fits)
    result.locator(".source-open").first.click()
    shown(page.locator("#reader .marked")).to_be_visible()
    assert page.evaluate(
        "() => { const t = document.getElementById('reader-text'); return t.scrollWidth <= innerWidth; }"
    )
    page.keyboard.press("Escape")
    menu(page)
    shown(page.get_by_role("button", name=f"Delete {HOPS}")).to_be_in_viewport()
    page.keyboard.press("Escape")
    shown(page.locator("#menu")).to_be_focused()
    page.get_by_role("link", name="Documents").click()
    shown(page.locator("#listing tbody tr").first).to_be_visible()
    assert page.evaluate(fits)


def test_long_words_need_no_scrolling_to_the_side_at_400_percent(visit_of, key, forgiven):
    forgiven.add(400)
    page = ready(visit_of(key[1], viewport={"width": 320, "height": 256}).page)
    with settings(page) as panel:
        panel.get_by_label("Only where").fill("x" * 300)
    enter(page)
    shown(page.locator(".answer.failed .state")).to_contain_text("x" * 150)
    page.evaluate("() => { document.getElementById('facts').textContent = 'x'.repeat(300); }")
    fits = "() => document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    page.get_by_role("link", name="Documents").click()
    page.locator("#listing tbody button").first.click()
    shown(page.locator("#reader .block").first).to_be_visible()
    page.evaluate("() => { document.getElementById('reader-name').textContent = 'x'.repeat(250); }")
    last = page.locator("#reader .block").last
    last.scroll_into_view_if_needed()
    shown(last).to_be_in_viewport()
    assert page.locator("#reader-text").bounding_box()["height"] >= 100


def test_the_key_is_asked_for_and_kept(visit_of, key, forgiven):
    forgiven.add(401)
    tracker = visit_of(None)
    page, dialog = tracker.page, tracker.page.get_by_role("dialog", name="This server asks for a key")
    shown(dialog.get_by_label("Key")).to_be_focused()
    page.keyboard.type("rk-wrong")
    page.keyboard.press("Enter")
    shown(dialog.get_by_role("alert")).to_have_text("That key was refused. Try another one.")
    dialog.get_by_label("Key").fill(key[1])
    dialog.get_by_role("button", name="Use it").click()
    ready(page)
    shown(ask(page, QUESTION).locator(".text")).to_contain_text("360")
    page.reload()
    ready(page)
    shown(dialog).to_be_hidden()
    assert tracker.context.storage_state()["cookies"] == []
    other = visit_of(None).page
    other.get_by_role("button", name="Cancel").click()
    shown(other.locator("#alert")).to_contain_text("The key is missing or wrong")


def test_script_in_a_document_stays_text(page, rag):
    result = ask(page, "What is the gremlin called?", engine="pced", top_k=1)
    source = rag.query("What is the gremlin called?", engine="pced", top_k=1).sources[0]
    assert source.document == EVIL
    assert source.heading == "<script>alert(2)</script>"
    open_it = result.locator(".source-open")
    shown(open_it).to_have_text(f"{EVIL}, <script>alert(2)</script>")
    shown(result.locator(".source-text")).to_contain_text("The gremlin is called Zorvath.")
    open_it.click()
    shown(page.locator("#reader .where")).to_have_count(0)  # the heading is in the text
    shown(page.locator("#reader-text .head")).to_have_text("<script>alert(2)</script>")
    for message in ("[look](javascript:alert(3))", "<img src=x onerror=alert(4)>", "<script>alert(5)</script>"):
        shown(page.locator("#reader-text")).to_contain_text(message)
    shown(page.get_by_role("heading", name=EVIL)).to_be_visible()
    page.keyboard.press("Escape")
    name = f"می\u200cخواهم {EVIL}"  # its joiner stays
    drop(page, (name, "Zorvath sleeps."))
    shown(page.locator(".job-name").first).to_have_text(name)
    shown(page.locator(".job-state").first).to_contain_text("1 added")
    page.get_by_role("button", name=f"Delete {name}").click()
    shown(page.locator("#confirm-said")).to_contain_text(name)
    page.locator("#confirm-yes").click()
    shown(page.get_by_role("button", name=f"Delete {name}")).to_have_count(0)
    scripts = page.evaluate("() => [...document.scripts].map((script) => script.getAttribute('src'))")
    assert scripts == ["page/theme.js", "page/main.js"]
    assert page.locator("img, iframe, object, embed, [onerror], [href^='javascript']").count() == 0


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_axe_finds_nothing_but_trifles(visit_of, key, scheme):
    package = pytest.importorskip("axe_playwright_python")
    axe = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    page = ready(visit_of(key[1], color_scheme=scheme, bypass_csp=True, reduced_motion="reduce").page)

    page.evaluate(axe)

    def faults():
        found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
        return [
            (each["id"], node["target"], node.get("failureSummary"))
            for each in found["violations"]
            if each["impact"] != "minor"
            for node in each["nodes"]
        ]

    assert faults() == []
    with settings(page) as panel:
        panel.get_by_role("button", name="Compare another setting").click()
        panel.locator(".lane").last.get_by_label("Engine").select_option("full")
        assert faults() == []
    ask(page, HOPS, engine="pced", top_k=3, answers=2)
    result = ask(page, HOPS, engine="pced", top_k=3, answers=2)
    assert faults() == []
    unfolded(result)
    result.get_by_role("group", name="Experts").get_by_role("button").first.click()
    assert faults() == []
    result.locator(".source-open").first.click()
    shown(page.locator("#reader .marked")).to_be_visible()
    assert faults() == []
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Documents").click()
    assert faults() == []
