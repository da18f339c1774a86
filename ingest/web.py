"""Pages of the web as sources: one page, the pages of a list, or those of a sitemap.

A page is fetched when the ingest reaches it, and its URL is its document id and its name. robots.txt is honoured
(RFC 9309). A page and its redirects stay on its host, those of a sitemap in its folder. A host name is resolved once,
checked, and the connection is made to the checked IP address, so neither a redirect nor the DNS leads into a private
network. Everything that a server sends is bounded in bytes and time, and parsed in the isolated reader.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from email.message import Message
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from ragkv.errors import IngestError, UsageError
from ragkv.ingest.charset import decode
from ragkv.ingest.parser import TEXT, Parsed, ParseLimits, Unreadable, media_type_of
from ragkv.ingest.sandbox import SourceReader, UnreadableSource
from ragkv.ingest.source import Skipped, SourceFile, sniff

if TYPE_CHECKING:
    from urllib.robotparser import RobotFileParser

MAX_PAGES = 1000
_AGENT = "ragkv"
_SITEMAP = "application/sitemap+xml"
_MAX_LISTED = 50_000  # pages of a sitemap; the protocol's limit
_MAX_PAGE_BYTES = 64 << 20  # unpacked
_TOO_LARGE = f"larger than {_MAX_PAGE_BYTES:,} bytes"
_NO_ADDRESS = "it is no address of the web (http or https)"
_MAX_ROBOTS_BYTES = 512 << 10  # RFC 9309, 2.5
_NOMINAL_BYTES = 1 << 14  # of a page in the progress, before it is fetched
_MAX_REDIRECTS = 5
_CONNECT_SECONDS, _READ_SECONDS, _PAGE_SECONDS = 10.0, 30.0, 120.0
_MAX_FAILURES = 3  # consecutive ones after which a host is not asked again
_MAX_URL_CHARACTERS = 2048
_GLOBAL_IPV6, _NAT64 = ipaddress.IPv6Network("2000::/3"), ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL = [
    ipaddress.ip_network(network)
    for network in re.findall(
        r"\S+",
        """0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
        192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24
        203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 2001::/23 2001:db8::/32 2620:4f:8000::/48 3fff::/20""",
    )
]
"""IANA's special-purpose registries, and multicast. Python's `is_global` differs between versions and counts what is
not allocated as public, so an IPv6 address has to be in the one range that is allocated."""


def from_web(*addresses: str, urls: Iterable[str] = (), **rules: Any) -> list[SourceFile]:
    """The sources of pages and sitemaps, and of a list of pages (`urls`), for `RagKV.ingest`.

    `rules` are the fields of `Web`: `allow_private`, `max_pages`, `limits`. The addresses are fetched now, the pages
    that they list when the ingest reaches them. Raises UsageError or IngestError if none of it may be read.
    """
    return Web(**rules).sources(addresses, urls)


def is_address(text: str) -> bool:
    """Whether an argument is a web address and not a path."""
    return re.match(r"https?:/", text, re.IGNORECASE) is not None


def read_sitemap(data: bytes) -> Parsed:
    """The addresses of a sitemap, one a line (sitemaps.org)."""
    from lxml import etree

    root = etree.fromstring(data, etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False))
    if etree.QName(root).localname == "sitemapindex":
        raise Unreadable("it is an index of sitemaps; name the sitemaps that it lists")
    pages = [" ".join("".join(loc.itertext()).split()) for loc in root.iter("{*}loc")]
    if len(pages) > _MAX_LISTED:
        raise Unreadable(f"sitemap cannot be read: it lists more than {_MAX_LISTED:,} addresses")
    return Parsed(text="\n".join(filter(None, pages)))


def _page(address: str, media_type: str, data: bytes | None = None, **more: Any) -> SourceFile:
    """The source of a page; with its `data`, the address is that after redirects."""
    size = _NOMINAL_BYTES if data is None else len(data)
    return SourceFile(
        path=Path(address), document_id=address, name=address, media_type=media_type, data=data, size=size, **more
    )


@dataclass(slots=True)
class _Site:
    """The connections to a host and port, its robots.txt, and its consecutive failures."""

    pool: Any
    robots: RobotFileParser | None = None
    failures: int = 0


class _RedirectError(Unreadable):
    pass


class _HTTPStatusError(Unreadable):
    def __init__(self, status: int) -> None:
        super().__init__(f"the server answers {status}")
        self.status = status


@dataclass(slots=True, eq=False, kw_only=True)
class Web:
    """The pages of one ingest, with the rules for fetching them; the `remote` of their sources.

    `allow_private` allows addresses that the internet does not route, such as those of an internal wiki. `skipped` are
    listed pages that may not be read.
    """

    allow_private: bool = False
    max_pages: int = MAX_PAGES
    limits: ParseLimits | None = None
    skipped: list[Skipped] = field(default_factory=list)
    _scopes: dict[str, str] = field(default_factory=dict)
    """The address below which each page and its redirects stay."""
    _sitemaps: set[str] = field(default_factory=set)
    """The folders of the sitemaps."""
    _gone: set[str] = field(default_factory=set)
    _sites: dict[str, _Site] = field(default_factory=dict)
    _last: tuple[str, SourceFile] | None = None

    def __post_init__(self) -> None:
        if self.max_pages < 1:
            raise UsageError("--max-pages must be at least 1.")

    def sources(self, addresses: Iterable[str], listed: Iterable[str] = ()) -> list[SourceFile]:
        """The sources of `addresses`, which may be sitemaps, and of `listed`, which are pages."""
        for add, some in ((self._add, addresses), (self._add_page, listed)):
            for address in some:
                try:
                    add(_normal(address))
                except (Unreadable, UnreadableSource) as error:
                    self.skipped.append(Skipped(path=address, reason=getattr(error, "reason", str(error))))
        pages = list(self._scopes)
        if len(pages) > self.max_pages:
            left = f"{len(pages) - self.max_pages:,} more pages are listed: raise --max-pages"
            self.skipped.append(Skipped(path=self._scopes[pages[self.max_pages]], reason=left))
        if not pages:
            reasons = "; ".join(f"{skip.path}: {skip.reason}" for skip in self.skipped[:3])
            raise IngestError(f"Nothing to ingest: {reasons or 'no address is listed'}.", self.skipped)
        return [_page(page, TEXT, remote=self) for page in pages[: self.max_pages]]

    def get(self, source: SourceFile) -> SourceFile:
        """The source with its bytes and type; raises UnreadableSource. The last page stays here, for the next call."""
        address = source.document_id
        try:
            if self._last is None or self._last[0] != address:
                self._last = (address, self._fetch(address, self._scopes[address]))
            page = self._last[1]
            if page.document_id != address and page.document_id in self._scopes:
                raise Unreadable(f"it redirects to {page.document_id}, which is listed itself")
        except Unreadable as error:
            if isinstance(error, _HTTPStatusError) and error.status in (404, 410):
                self._gone.add(address)
            raise UnreadableSource(source.name, str(error)) from None
        return replace(page, path=source.path, document_id=address, name=source.name)

    def is_gone(self, document_id: str) -> bool:
        """Whether this document's page is gone: the server says so, or the sitemap above it no longer lists it."""
        return document_id in self._gone or (
            document_id not in self._scopes
            and is_address(document_id)
            and any(_is_below(document_id, folder) for folder in self._sitemaps)
        )

    def _add_page(self, address: str) -> None:
        self._scopes.setdefault(address, urljoin(address, "/"))

    def _add(self, address: str) -> None:
        """Add a page, or the pages of a sitemap; those outside of its folder are skipped."""
        page = self._fetch(address, urljoin(address, "/"))
        if page.media_type != _SITEMAP:
            self._add_page(address)
            self._last = (address, page)
            return
        folder = urljoin(address, ".")
        with SourceReader(self.limits) as reader:
            lines = reader.read(page).text.splitlines()
        self._sitemaps.add(folder)
        outside = 0
        for line in lines:
            try:
                listed = _normal(line, address)
            except Unreadable as error:
                self.skipped.append(Skipped(path=line, reason=str(error)))
                continue
            if _is_below(listed, folder):
                self._scopes.setdefault(listed, folder)
            else:
                outside += 1
        if outside:
            self.skipped.append(Skipped(path=address, reason=f"{outside:,} of its pages are not below {folder}"))

    def _fetch(self, address: str, scope: str, *, rules: bool = False) -> SourceFile:
        """Fetch an address by its site's rules, or these `rules`; raises Unreadable with the reason."""
        for _ in range(_MAX_REDIRECTS + 1):
            if not _is_below(address, scope):
                raise _RedirectError(f"it redirects to {address}, which is not below {scope}")
            site = self._site(address)
            if not rules:
                site.robots = site.robots or self._robots(urljoin(address, "/"))
                if not site.robots.can_fetch(_AGENT, address):
                    raise Unreadable("the site's robots.txt does not allow it")
            answer = self._ask(address, site, _MAX_ROBOTS_BYTES if rules else None)
            if isinstance(answer, SourceFile):
                return answer
            address = _normal(answer, address)
        raise _RedirectError(f"it redirects more than {_MAX_REDIRECTS} times")

    def _robots(self, root: str) -> RobotFileParser:
        """The rules of a site: none if it has no robots.txt. RFC 9309: if it cannot be read, nothing is allowed."""
        from urllib.robotparser import RobotFileParser

        parser = RobotFileParser()
        try:
            text = self._fetch(urljoin(root, "/robots.txt"), root, rules=True).read().decode("utf-8", "replace")
            parser.parse(text.splitlines())
        except (_HTTPStatusError, _RedirectError) as error:
            if isinstance(error, _HTTPStatusError) and error.status >= 500:
                raise Unreadable(f"the site's robots.txt cannot be read ({error})") from None
            parser.parse([])
        except ValueError:  # of an address or a number in a rule
            raise Unreadable("the site's robots.txt cannot be read (a rule is malformed)") from None
        return parser

    def _site(self, address: str) -> _Site:
        """The connections to an address's host; raises Unreadable if the host may not be contacted."""
        from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, Timeout

        root = urljoin(address, "/")
        if root not in self._sites:
            parts = urlsplit(address)
            host, secure = parts.hostname or "", parts.scheme == "https"
            port = parts.port or (443 if secure else 80)
            try:
                resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError):
                raise Unreadable(f"the host {host} is not known") from None
            addresses = [str(entry[4][0]) for entry in resolved]
            if not self.allow_private and not all(map(_is_public, addresses)):
                raise Unreadable(f"{host} is in a private network: add --allow-private if it is yours")
            ip = min(addresses, key=lambda address: ":" in address)  # networks resolve IPv6 names without routing it
            timeout = Timeout(connect=_CONNECT_SECONDS, read=_READ_SECONDS)
            options: dict[str, Any] = {"timeout": timeout, "retries": False, "maxsize": 1}
            options |= {"server_hostname": host, "assert_hostname": host} if secure else {}
            self._sites[root] = _Site((HTTPSConnectionPool if secure else HTTPConnectionPool)(ip, port, **options))
        return self._sites[root]

    def _ask(self, address: str, site: _Site, cut_bytes: int | None) -> SourceFile | str:
        """One request, in a thread, because a server can send headers slowly for ever: the page, or a redirect."""
        if site.failures >= _MAX_FAILURES:
            raise Unreadable("the host did not answer before")
        answers: list[SourceFile | str | BaseException] = []

        def work() -> None:
            try:
                answers.append(_request(address, site.pool, cut_bytes))
            except BaseException as error:
                answers.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(_PAGE_SECONDS)
        answer = answers[0] if answers else TimeoutError("timed out")
        if isinstance(answer, Unreadable):
            raise answer
        site.failures = site.failures + 1 if isinstance(answer, BaseException) else 0
        if isinstance(answer, BaseException):
            slow = type(answer).__name__.endswith("TimeoutError")
            why = "it is too slow" if slow else f"{type(answer).__name__}: {str(answer)[:100]}"
            raise Unreadable(f"the host does not answer: {why}") from answer
        return answer


def _request(address: str, pool: Any, cut_bytes: int | None) -> SourceFile | str:
    """GET an address: the page with its type, or the address that it redirects to.

    Raises Unreadable for a status, a type or a size that is not supported, and the errors of urllib3. A body of more
    than `cut_bytes` is cut off.
    """
    parts = urlsplit(address)
    target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
    agent = f"{_AGENT}/{version('ragkv')}"
    headers = {"Host": parts.netloc, "User-Agent": agent, "Accept": "*/*", "Accept-Encoding": "gzip"}
    ends = time.monotonic() + _PAGE_SECONDS
    response = pool.request("GET", target, headers=headers, redirect=False, preload_content=False)
    try:
        if response.status in (301, 302, 303, 307, 308) and response.headers.get("Location"):
            return str(response.headers["Location"])
        if response.status != 200:
            raise _HTTPStatusError(response.status)
        content = Message()
        content["Content-Type"] = response.headers.get("Content-Type", "")
        kind = content.get_content_type() if content["Content-Type"] else ""
        if kind.startswith(("image/", "audio/", "video/", "font/")) and media_type_of(kind) is None:
            raise Unreadable(f"unsupported type {kind}")
        data = bytearray()
        for block in response.stream(1 << 16, decode_content=True):
            data += block
            if len(data) > (cut_bytes or _MAX_PAGE_BYTES):
                if cut_bytes:
                    break
                raise Unreadable(_TOO_LARGE)
            if time.monotonic() > ends:
                raise TimeoutError("timed out")
    finally:
        response.close()  # if the body was read completely, the connection is back in the pool already
    return _typed(address, kind, content.get_content_charset(), bytes(data))


def _typed(address: str, kind: str, charset: str | None, data: bytes) -> SourceFile:
    """The response with its type by header, else by the address's suffix, else by its bytes."""
    if data[:2] == b"\x1f\x8b":  # a gzipped sitemap: here gzip is the file's format, not the transfer encoding
        try:
            data = zlib.decompressobj(47).decompress(data, _MAX_PAGE_BYTES + 1)
        except zlib.error:
            raise Unreadable("it is packed, and damaged") from None
        if len(data) > _MAX_PAGE_BYTES:
            raise Unreadable(_TOO_LARGE)
    if re.search(rb"<(?:\w+:)?(?:urlset|sitemapindex)[\s>]", data[:4096]):
        return _page(address, _SITEMAP, data)
    suffix = posixpath.splitext(urlsplit(address).path)[1]
    known = media_type_of("text/html" if kind == "application/xhtml+xml" else kind) if "/" in kind else None
    if known in (None, TEXT):
        # Servers send Markdown as text, and unknown types as bytes.
        known = (media_type_of(suffix) if suffix else None) or known or sniff(data)
    if charset and known and known.startswith("text/"):  # a mark, which comes before what the page declares itself
        data = decode(data, charset, markup=known == "text/html").encode("utf-8-sig")
    return _page(address, known or TEXT, data)


def _normal(address: str, base: str = "") -> str:
    """The canonical spelling of an address, which may be relative to `base`; raises Unreadable if it is not http(s), or
    contains a password.
    """
    from urllib3.exceptions import LocationParseError
    from urllib3.util import parse_url

    try:
        url = parse_url(re.sub("(?i)%2e", ".", urljoin(base, address.strip())))  # resolves `..` and encodes the host
    except (ValueError, LocationParseError):
        raise Unreadable(_NO_ADDRESS) from None
    if url.scheme not in ("http", "https") or not url.host:
        raise Unreadable(_NO_ADDRESS)
    if url.auth is not None:
        raise Unreadable("it holds a name or password, which would be stored with every document")
    port = None if url.port == (443 if url.scheme == "https" else 80) else url.port
    normal = url._replace(port=port, path="/" + (url.path or "").lstrip("/"), fragment=None).url
    if len(normal) > _MAX_URL_CHARACTERS or not normal.isprintable():
        raise Unreadable(f"its address is longer than {_MAX_URL_CHARACTERS:,} characters")
    return normal


def _is_below(address: str, scope: str) -> bool:
    """Whether an address has the host of `scope`, with either scheme, and is in its folder."""
    parts, base = urlsplit(address), urlsplit(scope)
    if parts.hostname != base.hostname or parts.port != base.port:
        return False
    path = posixpath.normpath(unquote(parts.path)) + "/"  # a server may read %2e%2e as the parent folder
    return path.startswith(unquote(base.path))


def _is_public(address: str) -> bool:
    """Whether the internet routes an IP address; of one that carries an IPv4 address, whether it routes that."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return not any(ip in network for network in _SPECIAL)
    embedded = [ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ())]
    embedded += [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)] if ip in _NAT64 else []
    if inner := [str(ipv4) for ipv4 in embedded if ipv4 is not None]:
        return all(map(_is_public, inner))
    return ip in _GLOBAL_IPV6 and not any(ip in network for network in _SPECIAL)
