"""Bytes to text, in the one order that all readers share."""

import base64
import json
import random

import pytest
from reading import read

from ragkv.ingest.charset import codec_of, decode

RUSSIAN = "Встреча перенесена на среду."
SENTENCES = {
    "de cp1252": "Herr Müller prüfte die Größe der Tür.|Übermorgen öffnet das Café wieder.|Sie grüßen Frau Schäfer.",
    "fr cp1252": "L'élève a déjà mangé sa crêpe.|Où êtes-vous né, garçon ?|Madame Lefèvre habite à Genève.",
    "es cp1252": "La señora Muñoz llegó tarde.|¿Dónde está la estación?|El barco sale del puerto.|Mañana no.",
    "pt cp1252": "A reunião começa às três horas.|João não conhece a avó de Inês.|Amanhã vamos à praia.",
    "it cp1252": "La città è più bella di sera.|Perché non è venuto lunedì?|Il treno parte alle nove.",
    "nl cp1252": "De coëfficiënt is te hoog.|Het café is één uur open.|Mijn zoon heeft geen idee.",
    "sv cp1252": "Åsa köpte en blå båt i Malmö.|Mötet börjar på måndag.|Han bor här.",
    "nb cp1252": "Båten går fra Tromsø på lørdag.|Prøv å åpne døra nå.|Kjøkkenet er på høyre side.",
    "fi cp1252": "Äiti ostaa leipää ja jäätelöä.|Kesällä yö on lyhyt.|Talo on pieni ja sininen.",
    "en cp1252": "“It’s five o’clock” – that is £30, or 45°.|Ask José for the key.|Nothing was said, naïve as he is.",
    "pl cp1250": "Pociąg do Łodzi odjeżdża o piątej.|Książka leży na stole obok okna.|Nie wiem, gdzie jest klucz.",
    "cs cp1250": "Příliš žluťoučký kůň úpěl ďábelské ódy.|Vlak do Plzně odjíždí v pět hodin.|Účet zaplaťte do středy.",
    "hu cp1250": "A vonat öt órakor indul Győrbe.|Köszönöm az üzenetet a találkozóról.|Hétfőn nem tudok jönni.",
    "tr cp1254": "Toplantı pazartesi günü başlıyor.|İstanbul'da yağmur yağıyor.|Çocuk dondurma istiyor, değil mi?",
    "lt cp1257": "Knyga guli ant stalo šalia lango.|Traukinys į Vilnių išvyksta penktą valandą.|Ačiū už žinutę.",
    "ru cp1251": "Поезд в Москву отходит в пять часов.|Книга лежит на столе у окна.|Вчера шёл дождь.",
    "ru koi8-r": "Поезд в Москву отходит в пять часов.|Книга лежит на столе у окна.|Вчера шёл дождь.",
    "uk cp1251": "Поїзд до Києва вирушає о п'ятій.|Її брат живе у Львові.|Сьогодні гарна погода.",
    "el cp1253": "Το τρένο για την Αθήνα φεύγει στις πέντε.|Ευχαριστώ για το μήνυμα.",
    "he cp1255": "הרכבת לתל אביב יוצאת בחמש.|הספר נמצא על השולחן ליד החלון.",
    "ar cp1256": "يغادر القطار إلى القاهرة في الخامسة.|الكتاب على الطاولة قرب النافذة.",
    "cs iso8859-2": "Šťastný řidič prší.|Vlak do Plzně odjíždí v pět hodin, vaše věc.|Účet zaplaťte do úterý, příště.",
    "pl iso8859-2": "Proszę być o piątej w środę.|Książka leży na stole, a źle są nożyce.|Śnieg w górach zaś topnieje.",
    "fr iso8859-15": "Le cœur de l'œuvre coûte 45 €.|L'élève a déjà mangé pour 3 €.|Œuvres à vendre près d'ici : 12 €.",
    "el iso8859-7": "Το τρένο για την Άρτα φεύγει στις πέντε.|Ευχαριστώ, Άννα, για το μήνυμα.|Άλλη μια φορά.",
    "ca cp1252": "L'àvia viu a Gràcia des de fa anys.|Què és això, senyor? Demà plourà.|L'avió surt cap a València.",
    "th cp874": "รถไฟไปเชียงใหม่ออกเวลาห้าโมง|ขอบคุณสำหรับข้อความ",
    "ja cp932": "会議は水曜日に変更になりました。|六角ボルト|お知らせをありがとうございます。",
    "ja euc-jp": "会議は水曜日に変更になりました。|六角ボルト|お知らせをありがとうございます。",
    "zh gb18030": "会议改到星期三了。|火车五点钟开往北京。|书在窗户旁边的桌子上。",
    "zh big5": "會議改到星期三了。|火車五點鐘開往臺北。|書在窗戶旁邊的桌子上。",
    "ko cp949": "회의가 수요일로 변경되었습니다.|기차는 다섯 시에 부산으로 떠납니다.|오늘 날씨가 좋네요.",
}


@pytest.mark.parametrize("table", [False, True])
def test_small_files_without_a_declaration(table):
    """600 files of two to five lines, or tables of 200 rows with as few lines of such text."""
    rng, wrong = random.Random(7), []
    for number in range(600):
        name = sorted(SENTENCES)[number % len(SENTENCES)]
        lines = [rng.choice(SENTENCES[name].split("|")) for _ in range(rng.randint(2, 5))]
        if table:
            rows = [f"{row},bolt M{row},{row * 10}" for row in range(200)]
            for line in lines:
                rows.insert(rng.randrange(len(rows)), f"0,{line.replace(',', ';')},5")
            lines = rows
        text = "\n".join(lines)
        if decode(text.encode(name.split()[1])) != text:
            wrong.append(name)
    assert len(wrong) <= 12, wrong  # 98 %


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ("cp1252", "½l Wasser, 5 µm, ±3 °C; © Müller, für 2½ Tage in Köln\n¼ Größe, § 5 ¶ 3"),
        ("cp1252", "L'élève a déjà mangé ½ crêpe\n±5 € à Genève, 1¼ kg"),
        ("cp1250", "Długość 5 µm, ±3 mm; © Nowak, ¶ 2\nłódź płynie, a książka leży"),
        ("cp1250", "Vlak v pět hodin, příští účet: 5 µg, © Novák, ±2\nŘíjen, dům, pěkný věk"),
    ],
)
def test_signs_of_windows_are_no_letters_of_iso_8859(codec, text):
    assert decode(text.encode(codec)) == text


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        *[("koi8-r", "koi8-r", RUSSIAN), ("x-cp1251", "cp1251", RUSSIAN), ("windows-1255", "cp1255", "שלום")],
        *[("iso-8859-8-i", "iso8859-8", "שלום"), ("gb2312", "gb18030", "朱镕基"), ("x-gbk", "gb18030", "会议")],
        *[
            ("iso-8859-1", "cp1252", "“the key’s price is 5 €”"),
            ("Shift_JIS", "cp932", "①髙島"),
            ("euc-kr", "cp949", "똠방"),
        ],
        *[("windows-31j", "cp932", "㈱六角"), ("cp-850", "cp850", "Größe"), ("ks_c_5601-1987", "cp949", "회의")],
        *[
            ("iso-2022-jp", "iso2022_jp", "会議は水曜日"),
            ("iso-2022-kr", "iso2022_kr", "회의"),
            ("utf-7", "utf-7", "Größe"),
        ],
        *[("macintosh", "mac_roman", "Größe"), ("big5", "big5hkscs", "會議"), ("euc-jp", "euc_jis_2004", "①会議")],
        *[("us-ascii", "utf-8", "Größe"), ("iso-8859-1", "utf-8", "Größe"), ("utf-16", "utf-16", "Größe")],
    ],
)
def test_declared_encodings_are_read_as_their_superset(tmp_path, label, codec, text):
    """By mail, by its HTML parts, and by a page; a name of the past for UTF-8 is not believed."""
    head = f"From: a@b.example\nContent-Transfer-Encoding: base64\nContent-Type: text/{{}}; charset={label}"
    page = f"<html><body><p>{text}</p></body></html>"
    for kind, body in (("plain", text), ("html", page)):
        mail = email_of(head.format(kind), body.encode(codec))
        assert read(tmp_path, "a.eml", mail).text.endswith(f"\n\n{text}")
    if not codec.startswith("utf-"):
        html = f'<html><head><meta charset="{label}"></head><body><p>{text}</p></body></html>'
        assert read(tmp_path, "a.html", html.encode(codec)).text == text
        xml = f'<?xml version="1.0" encoding="{label}"?><html><body><p>{text}</p></body></html>'
        assert read(tmp_path, "a.xhtml", xml.encode(codec)).text == text


def email_of(head: str, body: bytes) -> bytes:
    return head.encode() + b"\n\n" + base64.encodebytes(body)


@pytest.mark.parametrize(
    "label", ["rot13", "idna", "punycode", "unicode_escape", "zlib", "x-unknown", "", "..", "undefined"]
)
def test_names_that_are_no_encoding_of_text(label):
    assert codec_of(label) is None
    assert decode("Größe".encode(), label) == "Größe"


@pytest.mark.parametrize("codec", ["iso2022_jp", "iso2022_kr", "iso2022_jp_ext"])
def test_escapes_of_iso_2022(tmp_path, codec):
    text = {"iso2022_kr": "회의 수요일", "iso2022_jp": "会議は水曜日", "iso2022_jp_ext": "ｶｲｷﾞ 会議"}[codec]
    assert read(tmp_path, "a.txt", text.encode(codec)).text == text
    assert read(tmp_path, "a.csv", f"id,name,n\n1,{text},2\n2,b,3\n".encode(codec)).text.startswith(
        f"id: 1\nname: {text}"
    )
    vendors = b"\x1b$B2q5D-!-j\x1b(B"  # ① and ㈱ of NEC, which no standard has
    assert read(tmp_path, "b.txt", vendors).text == "会議①㈱"
    assert read(tmp_path, "c.txt", "\x1b[31mred\x1b[0m").text == "\x1b[31mred\x1b[0m"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (f"<p>{RUSSIAN} ".encode() + b"\x96 \xa9 2020</p>", f"{RUSSIAN} – © 2020"),
        ("<p>Größe über Länge</p><p>Grü".encode() + b"\xc3...</p>", "Größe über Länge\n\nGrü�..."),
        (f"<p>{RUSSIAN}</p>".encode()[:-5], RUSSIAN[:-1]),
        ("<p>Größe, Café, Élan, caf".encode() + b"\xe9 noir</p>", "Größe, Café, Élan, café noir"),
    ],
)
def test_a_page_that_declares_utf_8_is_utf_8(tmp_path, body, text):
    html = b'<html><head><meta charset="utf-8"></head><body>' + body
    assert read(tmp_path, "a.html", html).text == text


def test_a_byte_order_mark_comes_first_and_json_is_read_alike(tmp_path):
    for codec in ("utf-8-sig", "utf-16", "utf-32"):
        page = f'<html><head><meta charset="koi8-r"></head><body><p>{RUSSIAN}</p></body></html>'
        assert read(tmp_path, "a.html", page.encode(codec)).text == RUSSIAN
        assert (
            read(tmp_path, "a.json", json.dumps([{"text": RUSSIAN}], ensure_ascii=False).encode(codec)).text == RUSSIAN
        )
    rows = json.dumps([{"text": RUSSIAN}, {"text": RUSSIAN[:-1]}], ensure_ascii=False)
    assert read(tmp_path, "a.json", rows.encode("cp1251")).text == f"{RUSSIAN}\n\n{RUSSIAN[:-1]}"
    assert read(tmp_path, "a.txt", RUSSIAN.encode("utf-16")[:-1]).text.startswith(RUSSIAN[:-1])  # cut in a character
