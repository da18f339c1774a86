#!/bin/sh
# Puts the manuals that words.jsonl and meaning.jsonl ask about into the folder $1. Debian 12; fetches four packages.
set -eu
mkdir -p "$1/packages" "$1/manuals"
manuals=$(cd "$1/manuals" && pwd)
cd "$1/packages"
apt-get download sqlite3-doc git-doc postgresql-doc-15 python3.11-doc
for package in *.deb; do dpkg-deb -x "$package" .; done
doc=usr/share/doc
for page in wal lockingv3 faq whentouse isolation foreignkeys autoinc atomiccommit pragma lang_vacuum datatype3 \
    partialindex tempfiles limits; do cp "$doc/sqlite3/$page.html" "$manuals/sqlite-$page.html"; done
for page in gitfaq gittutorial git-rebase git-stash git-bisect gitignore git-worktree git-gc git-clean git-reset; do
    cp "$doc/git-doc/$page.html" "$manuals/"; done
for page in routine-vacuuming wal-configuration indexes-types transaction-iso warm-standby continuous-archiving; do
    cp "$doc/postgresql-doc-15/html/$page.html" "$manuals/pg-$page.html"; done
for page in heapq sched zipfile tempfile shutil subprocess argparse logging.handlers secrets; do
    cp "$doc/python3.11/html/library/$page.html" "$manuals/py-$page.html"; done
