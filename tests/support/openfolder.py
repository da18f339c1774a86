"""A folder that every user of the machine may enter, for tests that give up being root."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def may_be_entered(folder: Path) -> bool:
    return all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents))


@contextmanager
def open_folder() -> Iterator[Path | None]:
    """None where no temporary folder is open to all: TMPDIR may be a private one, and pytest's own folders are."""
    for place in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if Path(place).is_dir() and may_be_entered(Path(place).resolve()):
            with tempfile.TemporaryDirectory(dir=place) as folder:
                Path(folder).chmod(0o755)
                yield Path(folder)
            return
    yield None
