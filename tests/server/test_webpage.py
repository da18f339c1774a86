"""The page's files as served, and what they must not contain."""

import hashlib
import re
from html.parser import HTMLParser
from importlib import resources

import pytest
from guarded import guarded

from ragkv.server.settings import Keys, add_key

FILES = {path.name: path.read_text(encoding="utf-8") for path in (resources.files("ragkv.server") / "page").iterdir()}
NOTE = FILES["third-party.txt"]
VENDORED = dict(
    re.findall(r"^file: (\S+)\nwhat: .+\npackage integrity: sha512-\S+\nsha256: (\w{64})$", NOTE, re.MULTILINE)
)
"""Third-party files, with their recorded digests."""
OURS = sorted(set(FILES) - set(VENDORED) - {"third-party.txt"})
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|createContextualFragment|DOMParser|document\.write|srcdoc"
    r"|\beval\b|new Function|javascript:|setTimeout\([\"'`]|\.cssText|setAttribute\([\"']style"
)
"""Code that turns text into markup or scripts."""
ELSEWHERE = re.compile(r"(?:https?:)?//[a-z0-9]+\.[a-z]")


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_is_sent_with_its_type_and_a_policy(call, name):
    reply = call("GET", f"/page/{name}")
    assert reply.status_code == 200
    assert reply.text == FILES[name]
    kinds = {"html": "text/html", "css": "text/css", "js": "javascript", "svg": "image/svg+xml", "txt": "text/plain"}
    assert kinds[name.rpartition(".")[2]] in reply.headers["content-type"]
    policy = dict(each.split(" ", 1) for each in reply.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "form-action": "'none'",
        "base-uri": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
    }
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    again = call("GET", f"/page/{name}", headers={"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_needs_no_key_and_the_api_does(app, call_on, tmp_path):
    add_key(tmp_path / "keys", "ann")
    keys = Keys.read(tmp_path / "keys")

    def around(app):
        return guarded(app, keys=keys)

    assert call_on(app, "GET", "/", around=around).text == FILES["index.html"]
    assert call_on(app, "GET", "/page/main.js", around=around).status_code == 200
    assert call_on(app, "GET", "/page/none.js", around=around).status_code == 401
    assert call_on(app, "GET", "/api/indexes", around=around).status_code == 401
    assert call_on(app, "GET", "/page/%2e%2e/api/indexes", around=around).status_code == 401


@pytest.mark.parametrize(
    "name", ["none.js", "__init__.py", "..%2fwebpage.py", "%2e%2e%2fapp.py", "%2e%2e", "a/b", "index"]
)
def test_other_files_are_not_sent(call, name):
    assert call("GET", f"/page/{name}").status_code == 404


@pytest.mark.parametrize("name", OURS)
def test_text_never_becomes_markup_and_nothing_is_loaded_from_elsewhere(name):
    assert MARKUP.findall(FILES[name]) == []
    text = FILES[name].replace("http://www.w3.org/2000/svg", "")  # an XML namespace, which is never fetched
    assert ELSEWHERE.findall(text) == []


def test_the_policy_is_kept_no_script_or_style_stands_in_the_page():
    class Reader(HTMLParser):
        inline: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attributes):
            names = dict(attributes)
            if tag == "style" or "style" in names or (tag == "script" and "src" not in names):
                self.inline.append(tag)
            self.inline += [name for name in names if name.startswith("on")]

    Reader().feed(FILES["index.html"])
    assert Reader.inline == []


def test_every_module_is_there():
    named = {each for text in FILES.values() for each in re.findall(r'(?:from|import) "\./([\w.-]+)"', text)}
    named |= set(re.findall(r'(?:href|src)="page/([\w.]+)"', FILES["index.html"]))
    assert named | {"index.html", "third-party.txt"} == set(FILES)


def test_what_others_made_is_unchanged_and_has_its_licence():
    assert sorted(VENDORED) == ["markdown-it.umd.min.js", "purify.min.js"]
    folder = resources.files("ragkv.server") / "page"
    for name, digest in VENDORED.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    for package in ("markdown-it", "linkify-it", "mdurl", "uc.micro", "punycode.js", "entities", "DOMPurify"):
        assert f"==== {package} ====" in NOTE
