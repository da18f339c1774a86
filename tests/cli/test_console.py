"""Untrusted text is shown with its control characters escaped, on every path to stdout and stderr."""

import io
import json
import logging
import sys
import unicodedata
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outcome import Terminal
from rich.table import Table
from rich.text import Text

from ragkv.cli import console
from ragkv.cli.options import indexes
from ragkv.util.display import json_text, one_line, visible

ESCAPES = "\x1b]52;c;SGk=\x07"
KEPT = "\u00ad\u200b\u200c\u200d"
"""Soft hyphen, zero-width space and joiners, which Thai, Persian, Hindi and emoji need."""


@pytest.mark.parametrize(
    ("value", "shown"), [(0.12345, "0.123"), (54.06, "54.1"), (999.4, "999"), (999.9, "1,000"), (2580.3, "2,580")]
)
def test_three_digits_never_have_an_exponent(value, shown):
    assert console.three_digits(value) == shown


def test_every_control_and_bidi_character_is_written_out():
    for number in range(sys.maxunicode + 1):
        char = chr(number)
        odd = unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(char) in (
            *("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"),
        )
        odd = odd or char in "\u061c\u200e\u200f"
        if odd and char not in "\n\t":
            assert visible(char) == one_line(char) != char
            assert visible(char).isascii()
        elif unicodedata.category(char) not in ("Cf", "Cc", "Cn"):
            assert visible(char) == one_line(char) == char
    assert visible(f"a\n\tb{KEPT}é🙂") == f"a\n\tb{KEPT}é🙂"
    assert one_line("a\n\tb") == r"a\n\tb"
    assert visible(f"{ESCAPES}\r\x9b\u202e\udcff\U000e0041") == r"\x1b]52;c;SGk=\x07\r\x9b\u202e\udcff\U000e0041"


@given(st.text(st.characters() | st.sampled_from("\x1b\x9b\r\u2028\udc80\U000e0041")))
def test_shown_twice_is_shown_once_and_json_reads_back(text: str):
    assert visible(visible(text)) == visible(text)
    assert one_line(visible(text)) == one_line(text)
    for value in (text, {text: [text]}):
        written = json_text(value)
        assert visible(written) == written
        assert json.loads(written) == value
        assert json_text(value, ascii_only=True).isascii()


@pytest.mark.parametrize("terminal", [False, True])
def test_whoever_writes_to_the_streams_is_guarded(monkeypatch, terminal):
    out, err = (Terminal() if terminal else io.StringIO() for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with console.guarded():
        print(f"forgotten {ESCAPES}\r\x9b")
        print("\rforgotten")
        sys.stderr.writelines([f"a library {ESCAPES}\n"])
        sys.stderr.write(warnings.formatwarning(f"warned {ESCAPES}", UserWarning, "file\x1b.py", 1))
        assert sys.stdout.isatty() is terminal
    assert (sys.stdout, sys.stderr) == (out, err)
    assert out.getvalue() == "forgotten \\x1b]52;c;SGk=\\x07\\r\\x9b\n\\rforgotten\n"
    assert "\x1b" not in err.getvalue()
    assert err.getvalue().count(r"\x1b]52;c;SGk=\x07") == 2


def test_a_librarys_progress_bar_moves_on_a_terminal_and_nowhere_else(monkeypatch):
    parts = ("\r10%", "\n", "\x1b[A", "\r20%\r\x1b[2J")
    for stream, shown in (
        (Terminal(), "\r10%\n\x1b[A\r20%\\r\\x1b[2J"),
        (io.StringIO(), "\\r10%\n\\x1b[A\\r20%\\r\\x1b[2J"),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        with console.guarded():
            for part in parts:
                sys.stderr.write(part)
        assert stream.getvalue() == shown


def test_an_error_leaves_the_guard_for_its_traceback(monkeypatch):
    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(OSError, match="evil"), console.guarded():
        raise OSError(f"evil {ESCAPES}")
    sys.stderr.write(ESCAPES)
    assert err.getvalue() == r"\x1b]52;c;SGk=\x07"


def test_a_record_is_a_line_and_its_traceback_keeps_its_own():
    line = console.LogLine("%(head)s: %(message)s")
    record = logging.LogRecord("ragkv.x.y", logging.WARNING, "", 1, "bad %s", (f"a\nb{ESCAPES}",), None)
    assert line.format(record) == r"warning: bad a\nb\x1b]52;c;SGk=\x07"
    record.name = "other"
    assert line.format(record).startswith("other: bad")
    record.exc_text = "Traceback:\n  here"
    assert line.format(record).endswith("\nTraceback:\n  here")


def test_cells_are_lines_without_markup_or_emoji(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    table = Table("a", box=None, pad_edge=False)
    for cell in ("[red]x[/red] [/nothing]", "[link=x]y :bug:", f"{ESCAPES}\nrow", Text("[b]\x1b[1m")):
        table.add_row(cell)
    console.draw(table)
    result = ["a", "[red]x[/red] [/nothing]", "[link=x]y :bug:", r"\x1b]52;c;SGk=\x07\nrow", r"[b]\x1b[1m"]
    assert [line.rstrip() for line in out.getvalue().splitlines()] == result


def test_a_narrow_terminal_hides_no_name_and_cuts_no_figure(monkeypatch):
    table = console.plain()
    table.add_column("document", overflow="fold")
    for name in ("chunks", "tokens", "KV"):
        table.add_column(name, no_wrap=True)
    table.add_row("a-name-of-thirty-characters.md", "1,000,001", "20,211", "661.5 KiB")
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")  # rich takes a dumb terminal to be 80 wide
    monkeypatch.setenv("NO_COLOR", "1")
    console.draw(table)
    lines = [line.split() for line in sys.stdout.getvalue().splitlines()]
    assert lines[1] == ["a-name-of-thirty", "1,000,001", "20,211", "661.5", "KiB"]
    assert lines[2] == ["-characters.md"]
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    console.draw(table)
    assert sys.stdout.getvalue().splitlines() == [
        "document                        chunks     tokens  KV",
        "a-name-of-thirty-characters.md  1,000,001  20,211  661.5 KiB",
    ]


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # stdout uses the second in the C locale
def test_an_encoding_that_lacks_a_character_is_no_traceback(monkeypatch, errors):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", errors=errors))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with console.guarded():
        console.echo("é …")
        console.print_json({"é": "\x9b🙂"})
        sys.stdout.flush()
    first, second = raw.getvalue().decode("ascii").splitlines()
    assert first == r"\xe9 \u2026"
    assert json.loads(second) == {"é": "\x9b🙂"}


def test_tab_offers_no_name_that_a_shell_would_obey(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("good", f"bad{ESCAPES}", "row\nrow", "gnp\u202e"):
        (tmp_path / name).mkdir()
    assert indexes("") == ["good/"]
