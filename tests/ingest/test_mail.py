from email.message import EmailMessage
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reading import read, reason, rows

from ragkv.ingest.mail import read_eml

HEAD = "From: a@b.example\nSubject: Plan\nMIME-Version: 1.0\nContent-Type: "
HTML = "<html><body><p>The boat leaves at nine.</p></body></html>"


def mail(kind: str, *parts: str) -> str:
    """A multipart message of parts, each as its headers and its body."""
    bodies = "".join(f"--BB\nContent-Type: {part}\n" for part in parts)
    return f"{HEAD}multipart/{kind}; boundary=BB\n\n{bodies}--BB--\n"


PLAIN, PAGE = "text/plain\n\nThe boat leaves at nine.", f"text/html\n\n{HTML}"
FOOTER = "text/plain\nContent-Disposition: inline\n\n____\nBoats mailing list"
ENCODING = "Content-Transfer-Encoding: base64\n\n"
BASE64 = f"{HEAD}text/plain\n{ENCODING}"
OTHER = "the form text/html of the text, which has other words (nine)"


@pytest.mark.parametrize(
    ("message", "body", "left_out"),
    [
        (mail("alternative", PLAIN, PAGE), "The boat leaves at nine.", []),
        (mail("alternative", "text/plain\n\n \n", PAGE), "The boat leaves at nine.", []),
        (mail("alternative", PAGE, "text/plain; charset=utf-8\n\n\n"), "The boat leaves at nine.", []),
        (mail("alternative", "text/plain\n\nThe boat leaves at.", PAGE), "The boat leaves at.", [OTHER]),
        (mail("mixed", PAGE, FOOTER), "The boat leaves at nine.\n\n____\nBoats mailing list", []),
        (mail("mixed", PLAIN, "image/png; name=a.png\n\nx"), "The boat leaves at nine.", ["attachment a.png"]),
        (
            mail(
                "mixed", PLAIN, "text/csv\nContent-Disposition: attachment; filename*=utf-8''Gr%C3%B6%C3%9Fe.csv\n\nx"
            ),
            "The boat leaves at nine.",
            ["attachment Größe.csv"],
        ),
        (
            mail("mixed", PLAIN, "message/rfc822\n\nFrom: c@d.example\nSubject: Old\n\nOld words."),
            "The boat leaves at nine.\n\nFrom: c@d.example\nSubject: Old\n\nOld words.",
            [],
        ),
        (
            mail("report", PLAIN, "message/delivery-status\n\nStatus: 5.1.1\n\n"),
            "The boat leaves at nine.",
            ["attachment message/delivery-status"],
        ),
        (mail("mixed", PLAIN) + "late words", "The boat leaves at nine.", ["text after the last part (late words)"]),
        (
            mail("mixed", PLAIN, "text/plain\n\n\0\1\2"),
            "The boat leaves at nine.",
            ["part 3 (text/plain): binary file"],
        ),
        (mail("mixed", "image/png; name=a.png\n\nx"), "", ["attachment a.png", "its text is empty"]),
        (f"{HEAD}text/html\n\n<p></p>", "", ["part 1 (text/html): no text found", "its text is empty"]),
        (f"{HEAD}multipart/mixed\n\nno boundary", "no boundary", []),
        (f"{BASE64}VGhlIGJvYXQgbGVhdmVz\nIGF0IG5pbmUu\n", "The boat leaves at nine.", []),
        (f"{BASE64}VGhlIGJvYXQgbGVhdmVz\nIGF0IG5pbmUuI", "The boat leaves at nine.", []),  # cut off
        (f"{BASE64}VGhlIGJvYXQ=\nIGxlYXZlcw==\n\n____\nBoats list", "The boat leaves\n____\nBoats list", []),
        (f"{BASE64}It is plain, though.", "It is plain, though.", []),
        (
            mail("mixed", f"message/rfc822\n{ENCODING}RnJvbTogY0BkLmV4YW1wbGUKCk9sZCB3b3Jkcy4=\n"),
            "From: c@d.example\n\nOld words.",
            [],
        ),
        (
            f"{HEAD}text/plain; format=flowed\n\nThe boat \nleaves \nat nine.\n From \n> here \n> on\n-- \nBob",
            "The boat leaves at nine.\nFrom \n> here \n> on\n-- \nBob",
            [],
        ),
        (f"{HEAD}text/plain; format=Flowed; delsp=yes\n\nFlaggen \nboot", "Flaggenboot", []),
    ],
)
def test_all_inline_text_is_read_and_the_rest_named(tmp_path, message, body, left_out):
    source = read(tmp_path, "a.eml", message)
    assert source.text.partition("Subject: Plan")[2].strip() == body
    assert list(source.left_out) == left_out


@pytest.mark.parametrize(
    ("raw", "subject"),
    [
        (b"=?koi8-r?B?98HW?= =?koi8-r?B?zs8=?=", "Важно"),
        (b"=?iso-8859-1?Q?=93the_key=94_5_=80?=", "“the key” 5 €"),
        (b"=?utf-8?Q?Gr=C3?=\n =?utf-8?Q?=B6=C3=9Fe?= am Tag", "Größe am Tag"),
        (b"=?gb2312?B?1uzpRrv5?=", "朱镕基"),
        (b"=?windows-31j?B?h0CH?= =?windows-31j?B?ig==?=", "①㈱"),
        (b"=?x-unknown?Q?Gr=C3=B6=C3=9Fe?=", "Größe"),
        ("Größe am Tag".encode(), "Größe am Tag"),
        ("Größe am schönen Tag für Frau Müller".encode("cp1252"), "Größe am schönen Tag für Frau Müller"),
        (b"=?utf-8?B?!?= =? ?= =?utf-8?Q?", "=? ?==?utf-8?Q?"),
    ],
)
def test_subjects(tmp_path, raw, subject):
    source = read(tmp_path, "a.eml", b"From: =?utf-8?Q?M=C3=BCller?= <a@b.example>\nSubject: " + raw + b"\n\nHello.")
    assert source.title == subject
    assert source.text == f"From: Müller <a@b.example>\nSubject: {subject}\n\nHello."


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_a_message_that_a_text_editor_saved(tmp_path, codec):
    assert read(tmp_path, "a.eml", "Subject: Größe\n\nHello.".encode(codec)).text == "Subject: Größe\n\nHello."


MBOX = """From a@example.org Mon Mar  3 10:00:00 2025
From: a@example.org
Subject: One

Hello.
From here on we use the new key.
>From now on, too.

From Monday on:
bring your key.
From Bob
To: me, he said.

From b@example.org Mon Mar  3 11:00:00 2025
Received: by mx;
 Mon, 3 Mar
Subject: Two

Second.
"""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_message_of_a_mailbox_begins_before_header_lines(tmp_path, end):
    source = read(tmp_path, "a.mbox", MBOX.replace("\n", end))
    assert rows(source) == [
        (
            "message 1 (One)",
            "From: a@example.org\nSubject: One\n\nHello.\nFrom here on we use the new key.\nFrom now on, too.\n\n"
            "From Monday on:\nbring your key.\nFrom Bob\nTo: me, he said.",
        ),
        ("message 2 (Two)", "Subject: Two\n\nSecond."),
    ]
    assert read(tmp_path, "b.mbox", f"Lost.\n\n{MBOX}").left_out == ("5 bytes before the first message",)
    assert reason(tmp_path, "c.mbox", MBOX.partition("\n")[2].partition("From b@")[0]).startswith(
        "mailbox cannot be read: no message begins with a line of From"
    )


WORDS = st.lists(st.integers(100_000, 999_999).map(lambda n: f"w{n}"), min_size=1, max_size=6)
TREES = st.recursive(
    st.tuples(st.sampled_from(["plain", "html", "calendar", "attachment"]), WORDS),
    lambda below: st.tuples(
        st.sampled_from(["mixed", "alternative", "related", "signed"]), st.lists(below, max_size=4)
    ),
    max_leaves=8,
)


@given(TREES)
def test_every_word_of_a_message_is_in_its_text_or_left_out(tree):
    expected: set[str] = set()

    def build(node):
        kind, below = node
        if kind == "attachment":
            expected.add(f"{below[0]}.bin")
            part = EmailMessage()
            part.set_content(b"x", "application", "octet-stream", filename=f"{below[0]}.bin")
            return part
        if below and isinstance(below[0], str):
            expected.update(below)
            text = "\n".join(f"<p>{word}</p>" for word in below) if kind == "html" else " ".join(below)
            return MIMEText(text, kind)
        part = MIMEMultipart(kind)
        for child in below:
            part.attach(build(child))
        return part

    message = build(tree)
    message["Subject"] = "Plan"
    parsed = read_eml(message.as_bytes())
    everything = f"{parsed.text} {parsed.left_out}"
    assert [word for word in expected if word not in everything] == []
    assert parsed.text.partition("Subject: Plan")[2].strip() or "its text is empty" in parsed.left_out
