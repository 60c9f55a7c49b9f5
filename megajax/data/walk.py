"""Files below a folder, or those that a glob matches, however symbolic links are laid.

Links to folders are followed, but each real folder is walked once for each part of the pattern, so
a link to an ancestor ends the walk there. Folders that are reached without a link come first: a
file keeps the name under which it really lies, where it has one below the root.
"""

import errno
import fnmatch
import glob
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megajax.core.errors import UserError


def files_below(root: Path) -> Iterator[Path]:
    """Yields the files of a folder and of those below it. Raises: UserError as files_matching."""
    return _walk(root, ("**",), hidden=True)


def files_matching(root: Path, pattern: Sequence[str]) -> Iterator[Path]:
    """Yields the files below `root` that a glob's parts match, with the rules of glob.glob.

    '**' stands for any folders, none included; names that begin with a dot are matched only by
    parts that do. Raises: UserError when a folder cannot be listed.
    """
    return _walk(root, tuple(pattern), hidden=False)


def each_file_once(files: Iterable[Path]) -> tuple[Path, ...]:
    """Returns the files in order; of several names of one file, one that is no link is kept."""
    found: dict[tuple[int, int], Path] = {}
    for file in sorted(files, key=lambda f: (f.is_symlink(), f)):
        try:
            its = file.stat()
        except OSError as error:  # it vanished since it was listed
            raise UserError(f"cannot read {file}: {error.strerror} (--data.source)") from None
        found.setdefault((its.st_dev, its.st_ino), file)
    return tuple(sorted(found.values()))


def _walk(root: Path, pattern: tuple[str, ...], hidden: bool) -> Iterator[Path]:
    waiting, linked = deque([(root, pattern)]), deque()
    walked = set()
    while waiting or linked:
        folder, parts = (waiting or linked).popleft()
        place = os.path.realpath(folder), len(parts)
        if place in walked or not os.path.isdir(folder):
            continue
        walked.add(place)
        part, rest = parts[0], parts[1:]
        if part == "**" and rest:
            waiting.append((folder, rest))
        for path in _named(folder, part, hidden):
            mode = _mode(path)
            if stat.S_ISDIR(mode):
                if below := parts if part == "**" else rest:
                    (linked if path.is_symlink() else waiting).append((path, below))
            elif not rest and stat.S_ISREG(mode):
                yield path


def _mode(path: Path) -> int:
    """Returns what a path is after its links, 0 for nothing and for a link that leads nowhere.

    Raises: UserError when that may not be asked, so that no text is left out in silence.
    """
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return 0
        raise UserError(f"cannot read {path}: {error.strerror} (--data.source)") from None


def _named(folder: Path, part: str, hidden: bool) -> list[Path]:
    """Returns what one part of a pattern matches in a folder."""
    if not glob.has_magic(part):
        return [folder / part]  # it need not exist; '..' is not listed
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror} (--data.source)") from None
    hidden = hidden or part.startswith(".")
    kept = (n for n in names if hidden or not n.startswith("."))
    return [folder / n for n in kept if part == "**" or fnmatch.fnmatch(n, part)]
