"""Bytes to text, in one order for files, pages and messages: byte order mark, what is declared outside (MIME, HTTP) and
inside (`<meta>`, XML), UTF-8 with a few wrong bytes, the escapes of ISO 2022, a guess.

Bytes that are not text are refused as binary.
"""

from __future__ import annotations

import codecs
import re

from ragkv.ingest.parser import Unreadable, check_text

BINARY = "binary file"
_NO_TEXT = {b"%PDF-": "it is a PDF: name it .pdf", b"{\\rtf": "RTF is not read; save it as DOCX or ODT"}
_BOMS = (  # UTF-32 first: its little-endian mark begins with UTF-16's
    (b"\xff\xfe\x00\x00", "utf-32"),
    (b"\x00\x00\xfe\xff", "utf-32"),
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_SUPERSETS = dict(
    re.findall(
        r"(\S+)=(\S+)",
        """iso8859-1=cp1252 iso8859-9=cp1254 iso8859-11=cp874 tis-620=cp874 shift_jis=cp932 euc_kr=cp949
    euc_jp=euc_jis_2004 gb2312=gb18030 gbk=gb18030 big5=big5hkscs cp950=big5hkscs""",
    )
)
"""Files that name the left one hold characters of the right one (WHATWG Encoding, 4.2)."""
_LABELS = dict(
    re.findall(
        r"(\S+)=(\S+)",
        """unicode11utf8=utf-8 unicode20utf8=utf-8 xunicode20utf8=utf-8 utf8mb4=utf-8 cp65001=utf-8 unicode=utf-16
    ucs2=utf-16 iso10646ucs2=utf-16 csunicode=utf-16 unicodefeff=utf-16-le unicodefffe=utf-16-be ansi=cp1252
    userdefined=cp1252 cp28591=cp1252 cp20127=ascii cp28605=iso8859-15 csisolatin9=iso8859-15 visual=iso8859-8
    logical=iso8859-8 suneugreek=iso8859-7 mac=mac_roman csmacintosh=mac_roman macukrainian=mac_cyrillic koi=koi8-r
    koi8=koi8-r koi8ru=koi8-u cskoi8r=koi8-r cp20866=koi8-r cp21866=koi8-u xbig5=big5 cnbig5=big5 xxbig5=big5 cp936=gbk
    cp54936=gb18030 csgb2312=gbk gb231280=gbk isoir58=gbk csiso58gb231280=gbk windows31j=cp932 sjis=cp932 sjiswin=cp932
    mskanji=cp932 cp943=cp932 cp943c=cp932 csshiftjis=cp932 eucjpwin=euc_jp eucjpms=euc_jp cp51932=euc_jp
    cseucpkdfmtjapanese=euc_jp cp50220=iso2022_jp cp50221=iso2022_jp iso2022jpms=iso2022_jp cseuckr=cp949 ksc5601=cp949
    ksc56011989=cp949 csksc56011987=cp949 isoir149=cp949 cp51949=cp949""",
    )
)
"""Names that Python does not know."""
_UNSAFE = {"idna", "punycode", "unicode-escape", "raw-unicode-escape", "undefined", "mbcs", "oem"}
"""Codecs of Python that no text is in, or that take quadratic time."""
_META = re.compile(
    rb"<meta\b[^>]{0,999}?\bcharset\s*=\s*[\"']?\s*([\w.:-]+)|<\?xml\b[^>]{0,999}?\bencoding\s*=\s*[\"']([\w.:-]+)",
    re.IGNORECASE,
)
_META_BYTES = 1 << 13
_SAMPLE_BYTES = 1 << 16
_GUESS_BYTES = 200_000
_UTF_8 = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_ISO_2022 = re.compile(rb"\x1b(?:\$[@AB]|\$\([CDOPQ]|\([IJ]|\$\)C)")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_CANDIDATES = [f"cp125{number}" for number in range(9)] + ["iso8859-9", "cp874", "koi8-r", "koi8-u"]
_CANDIDATES += ["cp932", "euc-jp", "gb18030", "big5hkscs", "cp949"]
_OTHER = "[\u0370-\u06ff\u0e00-\u0e7f]"
_LATIN_WORDS = re.compile(f"[A-Za-z]{_OTHER}|{_OTHER}[A-Za-z]")
_OTHER_WORD = re.compile(f"{_OTHER}{{3}}")
_ALPHABETS = [
    (codec, frozenset(letters))
    for codec, letters in re.findall(
        r"(\S+)=(\S+)",
        """cp1252=äöüß cp1252=àâçèéêëîïôùûüÿæœ cp1252=áéíñóúü cp1252=àáâãçéêíóôõúü cp1252=àèéìíîòóùú
    cp1252=àçèéíïòóúü cp1252=áéëèïíóöúü cp1252=åäöéü cp1252=æøåéóòâ cp1252=áæðéíóöúýþ cp1252=äõöüšž
    cp1250=ąćęłńóśźż cp1250=áčďéěíňóřšťúůýž cp1250=áäčďéíľňóôšťúýž cp1250=áéíóöőúüű cp1250=ćčđšž cp1250=âîăşţ
    cp1254=çğıöşüâîûi̇ cp1257=ąčęėįšųūž cp1257=āčēģīķļņšūž cp1257=äõöüšž
    cp1253=άέήίΰϊϋόύώαβγδεζηθικλμνξοπρστυφχψωςΐ""",
    )
]
"""A Latin or Greek encoding and the letters of a language that is written in it."""
_ALPHABETS += [
    (iso, row[1]) for row in _ALPHABETS if (iso := {"cp1250": "iso8859-2", "cp1253": "iso8859-7"}.get(row[0]))
]
_ALPHABETS.append(("iso8859-15", _ALPHABETS[1][1]))
_GREEK = ("cp1253", "iso8859-7")
_SIGNS = re.compile(  # but for those that stand where letters do
    r"[\x00-\x7f\xa0„”“’‘‚‹›–—…•«»€£§·°²³†™]|(?<![^\W\d_])([©®¦¶±¬½¼¾](?!»?[^\W\d_A-Z]{2})|[µ¿¡])|[ªº](?![^\W\d_])"
)


def decode(data: bytes, declared: str | None = None, *, markup: bool = False) -> str:
    """The text of bytes; `declared` is the encoding that MIME or HTTP name, and `markup` may name one itself.

    Raises `Unreadable` for binary data.
    """
    if reason := next((why for mark, why in _NO_TEXT.items() if data.startswith(mark)), None):
        raise Unreadable(reason)
    if not markup:  # its reader checks the text between the tags
        check_text(len(data) // 4)  # no encoding takes more than four bytes for a character
    text = _decoded(data, declared, markup)
    if not markup:
        check_text(len(text))
    sample = text[:65536]
    if "\x00" in sample or 50 * len(_CONTROL.findall(sample)) > len(sample) or 4 * sample.count("\ufffd") > len(sample):
        raise Unreadable(BINARY)
    return clean(text)


def _decoded(data: bytes, declared: str | None, markup: bool) -> str:
    if mark := next(((mark, name) for mark, name in _BOMS if data.startswith(mark)), None):
        if mark[1] != "utf-8":
            return data.decode(mark[1], "replace")
        data, declared, markup = data[3:], "utf-8", False
    labels = [declared or ""]
    if markup and (meta := _META.search(re.sub(rb"(?s)<!--.*?-->", b"", data[:_META_BYTES]))):
        labels.append((meta[1] or meta[2]).decode("ascii", "replace"))
    for label in labels:
        if (text := _declared(data, codec_of(label))) is not None:
            return text
    if name := _utf16(data):
        return data.decode(name, "replace")
    if _ISO_2022.search(data) and data.isascii():
        return _iso2022(data)
    if (text := _utf8(data, wrong_per_right=0.25)) is not None:
        return text
    if b"\x00" in data[:8192]:
        raise Unreadable(BINARY)
    return data.decode(_guess(data), "replace")


def codec_of(label: str) -> str | None:
    """The codec for a declared encoding, a superset of it if there is one; None for an unknown name."""
    label = re.sub(r"[^\w.:-]", "", label.lower())
    plain = re.sub(r"^(x-)+|[\W_]", "", label)
    short = re.sub(r"^(?:windows|win|cp|ms|ibm|dos)(?=\d+$)", "cp", plain)
    short = re.sub(
        r"^(?:cs)?(?:iso)?8859(1?\d)[ei]?$", r"iso8859-\1", short
    )  # -8-i is in logical order, as all text is
    for name in (_LABELS.get(plain), _LABELS.get(short), label, short):
        try:
            codec = codecs.lookup(name or "").name
            "a".encode(codec)  # LookupError for one that is not of text, as rot13
        except (LookupError, ValueError):
            continue
        return None if codec in _UNSAFE else _SUPERSETS.get(codec, codec)
    return None


def _declared(data: bytes, codec: str | None) -> str | None:
    """The text in a declared encoding, with a few wrong bytes; None if it is evidently another one."""
    if codec is None or (codec == "ascii" and not data.isascii()):
        return None
    if codec == "utf-8":
        return None if _ISO_2022.search(data) else _utf8(data, wrong_per_right=1)
    if codec.startswith(("utf-16", "utf-32")):
        if b"\x00" not in data:
            return None
        codec = _utf16(data) or codec
    elif codec.startswith("iso2022_jp"):
        return _iso2022(data)
    elif len(_UTF_8.findall(data, 0, 1 << 16)) > (0 if codec == "cp1252" else 3):
        try:
            return data.decode()  # names of old encodings outlive a conversion to UTF-8
        except UnicodeDecodeError:
            pass
    text = data.decode(codec, "replace")
    return text if 4 * text.count("\ufffd") <= _not_ascii(text) else None


def _utf8(data: bytes, *, wrong_per_right: float) -> str | None:
    """The text as UTF-8, in which some bytes are Windows-1252 or a character is cut; None if there are too many."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        start = error.start
    wrong = 0

    def single(error: UnicodeError) -> tuple[str, int]:
        nonlocal wrong
        wrong += 1
        assert isinstance(error, UnicodeDecodeError)
        if error.reason == "unexpected end of data":
            return "", error.end
        part, after = error.object[error.start : error.end], error.object[error.end : error.end + 1]
        cut = len(part) > 1 or (b"\xc2" <= part <= b"\xd1" and not after.isalpha())
        return "\ufffd" if cut else part.decode("cp1252", "replace"), error.end

    codecs.register_error("ragkv-single", single)
    text = ""
    for some in (data[max(0, start - _SAMPLE_BYTES // 2) :][:_SAMPLE_BYTES], data):  # most is told by a part of it
        wrong = 0
        text = some.decode("utf-8", "ragkv-single")
        if wrong > wrong_per_right * (_not_ascii(text) - wrong):
            return None
    return text


def _not_ascii(text: str) -> int:
    """The number of characters that are not ASCII."""
    return len(text) - len(text.encode("ascii", "ignore"))


def _utf16(data: bytes) -> str | None:
    """Recognise UTF-16 without a byte order mark: in most scripts, nearly every second byte is NUL."""
    sample = data[: 4096 & ~1]
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if odd > 0.4 * len(sample) / 2 and even == 0:
        return "utf-16-le"
    if even > 0.4 * len(sample) / 2 and odd == 0:
        return "utf-16-be"
    return None


def _iso2022(data: bytes) -> str:
    """Each codec knows other escapes; the last one, of JIS X 0213, has the characters that vendors added (①, ㈱)."""
    for codec in ("iso2022_kr",) if b"\x1b$)C" in data else ("iso2022_jp_2", "iso2022_jp_ext"):
        try:
            return data.decode(codec)
        except UnicodeDecodeError:
            continue
    return re.sub(rb"\x1b\$[@B]", b"\x1b$(Q", data).decode("iso2022_jp_2004", "replace")


def _guess(data: bytes) -> str:
    """The encoding of 8-bit or East Asian text, judged by the lines that are not ASCII."""
    import chardet

    lines = b"\n".join(line for line in data[: 1 << 24].splitlines() if not line.isascii())
    sample = (lines if 4 * len(lines) < len(data) else data)[:_GUESS_BYTES]  # words of ASCII tell the language too

    for japanese in ("cp932", "euc_jis_2004"):
        text = sample.decode(japanese, "replace")
        if 3 * len(re.findall("[\u3040-\u30ff]", text)) > _not_ascii(text) and "\ufffd" not in text[:-1]:
            return japanese
    guess = chardet.detect(sample, include_encodings=_CANDIDATES, prefer_superset=True)["encoding"]
    if guess is None:
        raise Unreadable(BINARY)
    text = sample.decode(guess, "replace")
    other = len(re.findall(_OTHER, text))
    if other and (not _OTHER_WORD.search(text) or 3 * len(_LATIN_WORDS.findall(text)) > other):
        guess = "cp1252"  # Latin words whose accented letters look like Greek or Cyrillic ones
    named = codecs.lookup(guess).name.replace("iso8859-9", "cp1254")
    if named not in dict(_ALPHABETS):
        return guess
    spelt = [codec for codec, letters in _ALPHABETS if letters.issuperset(_letters(sample, codec))]
    spelt = [codec for codec in spelt if (codec in _GREEK) == (named in _GREEK)] or [guess]
    spanish = named == "cp1250" and _ALPHABETS[2][1].issuperset(_letters(sample, "cp1252"))  # ñ and not ń
    return guess if named in spelt and not spanish else spelt[0]


def _letters(data: bytes, codec: str) -> str:
    return _SIGNS.sub("", data.decode(codec, "replace")).lower()


def clean(text: str) -> str:
    """Make all line ends `\\n`, and drop NULs and lone surrogates (which PDFs produce)."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8")
