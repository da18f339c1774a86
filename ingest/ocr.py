"""OCR of pictures and of pages without text, by the program tesseract, if it is installed.

It is a process of its own that inherits the limits of the process that reads the file (`ragkv.ingest.sandbox`).
"""

from __future__ import annotations

import io
import os
import subprocess
import warnings
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from ragkv.errors import install_hint
from ragkv.ingest.parser import Parsed, Unreadable, join_sections, limits
from ragkv.ingest.unwrap import unwrap

MAX_SCANS = 500  # pages of a document that are read by OCR
DPI = 300
MAX_SCAN_PIXELS = 12_000_000  # of a page for OCR; A4 at 300 dpi has 9
_MAX_IMAGE_PIXELS = 80_000_000
_MAX_LANGUAGES = 4
_MIN_CONFIDENCE = 50.0  # the mean of a page's words, of 100, below which it is taken for a photo


@cache
def _languages() -> frozenset[str]:
    """The languages of the installed tesseract; empty without one."""
    try:
        found = subprocess.run(["tesseract", "--list-langs"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(found.stdout.decode("utf-8", "replace").split("\n")[1:]) - {""}  # the first line is a heading


def ocr_missing(*, pictures: bool = False) -> str:
    """What to install before scanned pages or pictures can be read; empty if nothing is missing."""
    wanted = limits().ocr
    if wanted == "none":
        return 'ingest.ocr is "none"'
    steps = [] if _languages() - {"osd"} else ["install tesseract (apt-get install tesseract-ocr)"]
    if pictures and find_spec("PIL") is None:
        steps.append(install_hint("pdf"))
    if steps:
        return f"to read them, {' and '.join(steps)}"
    lacking = set() if wanted == "auto" else set(wanted.split("+")) - _languages()
    return f"tesseract lacks the language {', '.join(sorted(lacking))} of ingest.ocr" if lacking else ""


def recognise(width: int, height: int, pixels: bytes, dpi: int) -> str:
    """The lines of a picture of one byte for each pixel by tesseract; empty if it is not sure to see text."""
    wanted = limits().ocr
    if wanted == "auto":  # all that are installed, unless those are all that exist
        found = sorted(name for name in _languages() if name != "osd" and "/" not in name)
        wanted = "+".join(found if len(found) <= _MAX_LANGUAGES or "eng" not in found else ["eng"])
    turned = "1" if "osd" in _languages() else "3"  # page segmentation that also detects rotated pages
    picture = b"P5 %d %d 255 " % (width, height) + pixels
    done = subprocess.run(
        ["tesseract", "stdin", "stdout", "-l", wanted, "--dpi", str(max(70, dpi)), "--psm", turned, "tsv"],
        input=picture,
        capture_output=True,
        env={**os.environ, "OMP_THREAD_LIMIT": "1"},
    )
    if done.returncode:
        raise Unreadable(f"OCR failed (tesseract ended with {done.returncode})")
    lines: dict[tuple[str, ...], list[str]] = {}
    sure: list[float] = []
    for row in done.stdout.decode("utf-8", "replace").split("\n")[1:]:
        fields = row.split("\t")
        if len(fields) == 12 and fields[11].strip() and float(fields[10]) >= 0:
            sure.append(float(fields[10]))
            lines.setdefault(tuple(fields[1:5]), []).append(fields[11].strip())
    if not sure or sum(sure) / len(sure) < _MIN_CONFIDENCE:
        return ""
    paragraphs = groupby(lines, lambda line: line[:3])
    return "\n\n".join("\n".join(" ".join(lines[line]) for line in inside) for _, inside in paragraphs)


def read_image(data: bytes) -> Parsed:
    """The text of a picture, or of each page of a TIFF, by OCR."""
    if missing := ocr_missing(pictures=True):
        raise Unreadable(f"it is a picture; {missing}")
    from PIL import Image, ImageOps, UnidentifiedImageError

    pages: list[tuple[str, dict[str, Any]]] = []
    left_out: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "TIFF"))
            count = getattr(image, "n_frames", 1)
            if count > MAX_SCANS:
                left_out.append(f"pages {MAX_SCANS + 1}-{count}: only {MAX_SCANS} are read; split the file")
            for number in range(min(count, MAX_SCANS)):
                image.seek(number)
                if image.width * image.height > _MAX_IMAGE_PIXELS:
                    raise Unreadable(f"it has more than {_MAX_IMAGE_PIXELS:,} pixels")
                page = ImageOps.exif_transpose(image).convert("L")
                scale = min(1.0, (MAX_SCAN_PIXELS / (page.width * page.height)) ** 0.5)
                page = page.resize((max(1, int(page.width * scale)), max(1, int(page.height * scale))))
                text = unwrap(recognise(*page.size, page.tobytes(), round(DPI * scale)))
                pages.append((text, {"page": number + 1} if count > 1 else {}))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Unreadable(f"it has more than {_MAX_IMAGE_PIXELS:,} pixels") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise Unreadable(f"picture cannot be read: damaged structure ({type(error).__name__})") from error
    text, sections = join_sections(pages)
    return Parsed(text=text, sections=sections, left_out=left_out)
