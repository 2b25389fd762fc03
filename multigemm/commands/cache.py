"""`multigemm cache`: shows, clears, exports and imports what is cached on disk."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from multigemm.bench.reports import digits
from multigemm.cuda.disk_cache import DiskCache
from multigemm.errors import InvalidSetting
from multigemm.select.table import SCHEMA, decoded, table
from multigemm.settings import settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("action", nargs="?", default="show", choices=("show", "clear", "export", "import"))
    parser.add_argument("file", nargs="?", help="the JSON file that export writes and import reads")
    parser.add_argument("--what", help="for clear: a part that show lists, as tuning or cupy, or all (the default)")


def main(args: argparse.Namespace) -> int:
    """Shows, clears, exports or imports."""
    if args.action in ("export", "import") and not args.file:
        raise InvalidSetting(f"cache {args.action} needs a file name")
    if args.action in ("show", "clear") and args.file:
        what = f"; to clear a part, --what {args.file}" if args.action == "clear" else ""
        raise InvalidSetting(f"cache {args.action} takes no file, but {args.file!r} was given{what}")
    if args.action != "clear" and args.what is not None:
        raise InvalidSetting(f"--what goes with clear, not with {args.action}: leave it out")
    return {"show": _show, "clear": _clear, "export": _export, "import": _import}[args.action](args)


def _folders() -> list[DiskCache]:
    """The parts of the cache that hold anything. Other folders beside them are ignored."""
    root = settings().cache_dir
    found = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    return [part for part in map(DiskCache, found) if part.entries()]


def _state() -> str:
    """Why the cache may be empty: switched off, or its folder is not safe."""
    if not settings().cache:
        return " (switched off)"
    folder = next(path for path in (settings().cache_dir, *settings().cache_dir.resolve().parents) if path.exists())
    return "" if folder.is_dir() and os.access(folder, os.W_OK) else " (cannot be written: nothing is kept)"


def _show(args: argparse.Namespace) -> int:
    print(f"cache: {settings().cache_dir}{_state()}")
    for part in _folders():
        entries = part.entries()
        print(f"  {part.name:12}{len(entries):6} entries {sum(p.stat().st_size for p in entries) / 1024:10.1f} KiB")
    for entry in table().own.entries():
        for name, m in entry.backends.items():
            print(f"  tuned: {entry.device} | {entry.key} | {name}: {digits(m.us)} us {dict(m.config)}")
    for entry in table().choices.entries():
        times = ", ".join(f"{name} {digits(m.us)} us" for name, m in entry.backends.items())
        print(f"  chosen by auto: {entry.device} | {entry.key} | {entry.chosen} ({times}; {entry.date[:10]})")
    return 0


def _clear(args: argparse.Namespace) -> int:
    parts, what = {part.name: part for part in _folders()}, args.what or "all"
    if what != "all" and what not in parts:
        raise InvalidSetting(f"--what {what!r}: the cache holds {', '.join(parts) or 'nothing'}")
    gone = sum(part.clear() for name, part in parts.items() if what in ("all", name))
    print(f"entries removed: {gone}")
    return 0


def _export(args: argparse.Namespace) -> int:
    own = table().own.entries()
    lines = ",\n  ".join(json.dumps(entry.encoded()) for entry in own)
    Path(args.file).write_text(f'{{"schema": {SCHEMA}, "entries": [\n  {lines}\n]}}\n')
    print(f"measurements written to {args.file}: {sum(len(entry.backends) for entry in own)}")
    return 0


def _import(args: argparse.Namespace) -> int:
    try:
        raw = json.loads(Path(args.file).read_text())
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{args.file} cannot be read as an exported cache: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("entries"), list):
        raise InvalidSetting(
            f"{args.file} is no exported cache: `multigemm cache export FILE` or `tune --out` write one"
        )
    if raw.get("schema") != SCHEMA:
        raise InvalidSetting(f"{args.file} has schema {raw.get('schema')}; this version reads schema {SCHEMA}")
    try:
        entries = [decoded(entry, "") for entry in raw["entries"]]
    except ValueError as error:
        raise InvalidSetting(f"{args.file} is damaged: {error}") from error
    if why := table().keep(entries):
        raise InvalidSetting(f"the measurements were read, but not kept: {why}")
    print(f"measurements taken over: {sum(len(entry.backends) for entry in entries)}")
    return 0
