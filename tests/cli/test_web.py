"""Web pages from a local server: `ragkv ingest http://…`."""

import gzip
import json
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from outcome import Result

from ragkv import RagKV
from ragkv.errors import IngestError, UsageError
from ragkv.ingest import SourceFile, from_web, web
from ragkv.ingest.sandbox import UnreadableSource, read_source

PAGE = "<html><head><title>{0}</title></head><body><main><h1>{0}</h1><p>{1}</p></main></body></html>"
HALDEN = PAGE.format("Halden Works", "Halden Works was founded by Mira Oskel in 1907 on the quay.")
BOLT = PAGE.format("Bolt Ltd", "Bolt Ltd makes valves and was founded by Ann Lee in Varn.")


class Site(dict[str, Any]):
    """Path to body, or to (status, headers, body); `asked` has the paths of all requests."""

    address = ""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def sitemap(self, *paths: str, kind: str = "urlset", at: str = "/sitemap.xml") -> None:
        listed = "".join(f"<x><loc>{self.address * p.startswith('/') + p}</loc></x>" for p in paths)
        self[at] = f'<?xml version="1.0"?><{kind} xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{listed}</{kind}>'


@pytest.fixture
def site() -> Iterator[Site]:
    served = Site()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            served.asked.append(self.path)
            answer = served.get(self.path, (404, {}, ""))
            status, headers, body = answer if isinstance(answer, tuple) else (200, {}, answer)
            if callable(body):
                body = body()
            data = body.encode() if isinstance(body, str) else body
            self.send_response(status)
            for name, value in {"Content-Type": "text/html", "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None: ...  # the reader closes large or slow connections

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        served.address = f"http://127.0.0.1:{server.server_port}"
        yield served
        server.shutdown()
        thread.join()


@pytest.fixture
def command(ragkv) -> Callable[[str], Result]:
    return lambda words: ragkv(*words.split())


@pytest.fixture
def pages(site, read_here) -> Callable[..., list[SourceFile]]:
    return lambda *paths, **rules: from_web(*(site.address + path for path in paths), allow_private=True, **rules)


def outcome(source: SourceFile) -> str:
    try:
        return source.fetched().media_type
    except UnreadableSource as error:
        return error.reason


def reasons(sources: list[SourceFile]) -> list[str]:
    assert isinstance(sources[0].remote, web.Web)
    return [skip.reason for skip in sources[0].remote.skipped]


@pytest.mark.usefixtures("read_here")
def test_a_sitemap_stays_right(site, command, tmp_path, model_folder):
    site |= {"/a.html": HALDEN, "/b.html": BOLT, "/broken.pdf": (200, {"Content-Type": "application/pdf"}, "no")}
    site.sitemap("/a.html", "/b.html", "/broken.pdf", "/missing.html")
    index = tmp_path / "index"
    words = f"ingest {site.address}/sitemap.xml --allow-private --index {index}"
    done = command(f"{words} --model {model_folder} --device cpu --json")
    report = json.loads(done.out)
    assert report["added"] == [f"{site.address}/a.html", f"{site.address}/b.html"]
    assert {skip["path"].rpartition("/")[2]: skip["reason"] for skip in report["skipped"]} == {
        "broken.pdf": "PDF cannot be read: damaged structure",
        "missing.html": "the server answers 404",
    }
    assert site.asked.count("/a.html") == 1
    again = json.loads(command(f"{words} --json").out)
    assert (len(again["unchanged"]), again["kv_encoded"]) == (2, 0)
    site |= {"/a.html": HALDEN.replace("1907", "1908"), "/b.html": (410, {}, "")}
    site.sitemap("/a.html", "/b.html")
    third = json.loads(command(f"{words} --prune --json").out)
    assert (third["updated"], third["pruned"]) == ([f"{site.address}/a.html"], [f"{site.address}/b.html"])
    site["/c.html"] = BOLT
    site.sitemap("/c.html")
    assert f"would prune {site.address}/a.html" in command(f"{words} --prune --dry-run").out
    assert json.loads(command(f"{words} --prune --json").out)["pruned"] == [f"{site.address}/a.html"]
    with RagKV.open(index, device="cpu") as rag:
        [found] = rag.retrieve("Who founded Bolt Ltd?")
        assert (found.chunk.document_id, found.chunk.heading) == (f"{site.address}/c.html", "Bolt Ltd")


def test_a_page_and_a_list_of_pages(site, command, tmp_path, model_folder):
    site |= {"/docs/a.html": HALDEN, "/b.html": BOLT}
    (tmp_path / "urls.txt").write_text(f"# pages\n{site.address}/b.html\nftp://x/y\n")
    done = command(
        f"ingest {site.address}/docs/a.html#top --urls {tmp_path}/urls.txt --allow-private "
        f"--index {tmp_path}/index --model {model_folder} --device cpu"
    )
    assert ": 2 added, 1 skipped." in done.out
    assert "ftp://x/y: it is no address of the web" in done.err
    assert f"{site.address}/docs/a.html" in command(f"ls --index {tmp_path}/index").out
    assert command(f"delete {site.address}/b.html --yes --index {tmp_path}/index").code == 0


def test_private_networks_are_refused(site, command, tmp_path, monkeypatch):
    site["/a.html"] = HALDEN
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"):
        done = command(f"ingest http://{host}:{site.address.rpartition(':')[2]}/a.html --index {tmp_path}/index")
        assert done.code == 1
        assert "in a private network: add --allow-private if it is yours." in done.err
    assert not (tmp_path / "index").exists()
    # A public name that resolves to this machine, and one whose address changes.
    answers = iter(["127.0.0.1"])
    monkeypatch.setattr(web.socket, "getaddrinfo", lambda host, port, **_: [(2, 1, 6, "", (next(answers), port))])
    with pytest.raises(IngestError, match=r"example\.org is in a private network"):
        from_web("http://example.org/")
    assert site.asked == []


@pytest.mark.parametrize(
    ("addresses", "public"),
    [
        ("10.1.2.3 169.254.169.254 100.64.0.1 192.0.0.9 192.88.99.1 198.18.0.1 224.0.0.1 240.0.0.1 0.0.0.0", False),
        (
            "::1 fe80::1%eth0 fec0::1 fd00::1 ff0e::1 ::10.0.0.1 ::8.8.8.8 ::ffff:0:808:808 5f00::1 4000::1 100::1",
            False,
        ),
        ("64:ff9b:1::1 2001:db8::1 2001:20::1 2001:1::1 3fff::1 3fff:fff::1", False),
        ("::ffff:10.0.0.1 64:ff9b::a00:1 2002:7f00:1:: 2002:c058:6301:: 2001:0:808:808::f5ff:fffe", False),
        ("2001:0:a00:1::f7f7:f7f7", False),  # Teredo: the server is private
        ("93.184.215.14 2606:2800:21f:cb07::1 2a00:1450::1 ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::", True),
        ("2001:0:808:808::f7f7:f7f7", True),
    ],
)
def test_only_what_the_internet_routes_is_public(addresses, public, monkeypatch):
    """Asked from outside: what a host name resolves to is contacted, or refused as a private network."""
    for address in addresses.split():
        family = 10 if ":" in address else 2
        monkeypatch.setattr(web.socket, "getaddrinfo", lambda *_, **__: [(family, 1, 6, "", (address, 80))])  # noqa: B023
        monkeypatch.setattr(web, "_request", lambda *_, **__: pytest.fail("asked") if not public else _refused())
        with pytest.raises(IngestError) as refused:
            from_web("http://example.org/")
        assert ("private network" in str(refused.value)) is not public, address


def _refused() -> None:
    raise ConnectionError("there is no network in this test")


def test_pages_stay_below_what_was_named(site, pages):
    outside = "http://example.org/x.html"
    site |= dict.fromkeys(["/docs/a.html", "/docs/b/c.html", "/blog/d.html"], HALDEN)
    site |= {f"/docs/{i}": (302, {"Location": to}, "") for i, to in enumerate([outside, "/blog/d.html", "a.html", "3"])}
    redirects = [f"/docs/{i}" for i in range(4)]
    site.sitemap(
        "a.html", "b/c.html", "/blog/d.html", "/docs/%2e%2e/blog/d.html", outside, *redirects, at="/docs/s.xml"
    )
    sources = pages("/docs/s.xml")
    kinds = [outcome(each) for each in sources]
    assert kinds == [
        "text/html",
        "text/html",
        f"it redirects to http://example.org/x.html, which is not below {site.address}/docs/",
        f"it redirects to {site.address}/blog/d.html, which is not below {site.address}/docs/",
        f"it redirects to {site.address}/docs/a.html, which is listed itself",
        "it redirects more than 5 times",
    ]
    assert reasons(sources) == [f"3 of its pages are not below {site.address}/docs/"]  # one is spelled with `..`
    assert outcome(pages("/docs/1")[0]) == "text/html"  # a page given by the user may redirect within its host
    [*some] = pages("/docs/s.xml", max_pages=2)
    assert len(some) == 2
    assert "4 more pages are listed: raise --max-pages" in reasons(some)
    assert not some[0].remote.is_gone(f"{site.address}/docs/b/c.html")


def test_sitemaps_that_are_packed_damaged_or_lists_of_sitemaps(site, pages):
    site["/a.html"] = HALDEN
    site.sitemap("/a.html", at="/1.xml")
    site["/1.xml.gz"] = gzip.compress(site["/1.xml"].encode())
    sources = pages("/1.xml.gz")
    assert [source.name for source in sources] == [f"{site.address}/a.html"]
    assert sources[0].remote.is_gone(f"{site.address}/c.html")
    site["/2.xml"] = site["/1.xml"][:-20]
    site.sitemap("/1.xml", kind="sitemapindex", at="/index.xml")
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;">]><urlset><loc>http://x/&b;</loc></urlset>'
    site["/bomb.xml"] = bomb
    for path, reason in (("/2", "cannot be read"), ("/index", "it is an index of sitemaps"), ("/bomb", "Nothing to")):
        with pytest.raises(IngestError, match=reason):
            pages(f"{path}.xml")


def test_robots_are_honoured(site, pages):
    site |= {"/a.html": HALDEN, "/private/b.html": BOLT}
    site["/robots.txt"] = "User-agent: other\nDisallow: /\n\nUser-agent: ragkv\nDisallow: /private/\n"
    site.sitemap("/a.html", "/a/%2E./private/./b.html")
    kinds = [outcome(each) for each in pages("/sitemap.xml")]
    assert kinds == ["text/html", "the site's robots.txt does not allow it"]
    assert site.asked.count("/robots.txt") == 1
    site["/robots.txt"] = (302, {"Location": "http://example.org/robots.txt"}, "")
    assert outcome(pages("/private/b.html")[0]) == "text/html"  # a site without rules, says RFC 9309
    unreadable = ["User-agent: *\nDisallow: //[", "User-agent: *\nCrawl-delay: ²"]  # not for Python 3.14
    for unread in ((503, {}, ""), *(unreadable if sys.version_info < (3, 14) else [])):
        site["/robots.txt"] = unread
        with pytest.raises(IngestError, match=r"robots\.txt cannot be read"):
            pages("/a.html")


def test_addresses_that_are_none(site, pages):
    site |= {"/a.html": HALDEN, "/moved": (302, {"Location": "http://["}, "")}
    site.sitemap("/a.html", "/moved", "http://[")
    sources = pages("/sitemap.xml")
    no_address = "it is no address of the web (http or https)"
    assert [outcome(each) for each in sources] == ["text/html", no_address]
    assert reasons(sources) == [no_address]


def test_types_and_encodings(site, pages):
    cyrillic = "<html><body><main><h1>Привет</h1><p>Это простой русский текст.</p></main></body></html>"
    cases = {
        "/a": ("text/html; charset=koi8-r", cyrillic.encode("koi8-r"), "text/html"),
        "/b": ("application/xhtml+xml", HALDEN, "text/html"),
        "/c.md": ("text/plain", "# A\n\nb", "text/markdown"),
        "/d": ("application/octet-stream", b"%PDF-1.7", "application/pdf"),
        "/e.docx": ("application/octet-stream", b"PK", web.media_type_of(".docx")),
        "/f": ("", "plain words", "text/plain"),
        "/g": ("video/mp4", b"x", "unsupported type video/mp4"),
        "/h": ("text/plain; charset=nonsense", "words", "text/plain"),
        "/i": ("text/html; charset=UTF-8", cyrillic.replace("<main>", "<meta charset=koi8-r><main>"), "text/html"),
    }
    site |= {path: (200, {"Content-Type": kind}, body) for path, (kind, body, _) in cases.items()}
    site.sitemap(*cases)
    sources = pages("/sitemap.xml")
    assert [outcome(each) for each in sources] == [expected for *_, expected in cases.values()]
    assert read_source(sources[0].fetched()).text == "# Привет\n\nЭто простой русский текст."
    assert read_source(sources[8].fetched()).text == "# Привет\n\nЭто простой русский текст."


def test_hostile_servers(site, pages, monkeypatch):
    held = threading.Event()
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(100)) + packer.flush()
    site |= {
        "/bomb": (200, {"Content-Encoding": "gzip"}, bomb),
        "/broken": (200, {"Content-Encoding": "gzip"}, b"no gzip"),
        "/short": (200, {"Content-Length": "999999", "Connection": "close"}, lambda: b"x"),
        "/slow": (200, {}, lambda: b"x" * held.wait(600)),
        "/after": HALDEN,
    }
    site.sitemap(*site)
    sources = {each.name.rpartition("/")[2]: each for each in pages("/sitemap.xml")}
    assert outcome(sources["bomb"]) == f"larger than {64 << 20:,} bytes"
    assert outcome(sources["broken"]).startswith("the host does not answer: DecodeError: ")
    monkeypatch.setattr(web, "_PAGE_SECONDS", 0.1)
    assert outcome(sources["slow"]) == "the host does not answer: it is too slow"
    held.set()


def test_rules_that_are_none():
    with pytest.raises(UsageError, match="--max-pages"):
        from_web("http://example.org/", max_pages=0)
