"""New sqlite databases of other programs, copied from one that has their tables, instead of migrated from nothing.

MLflow and Prefect's server run dozens of migrations for each new database: several seconds of a processor. The first
database of a version is made by them; `keep` saves its tables in the user's cache folder, and `place` copies them for
the next one::

    ~/.cache/trainflow/databases/mlflow-3.17.2-5f0c1d9a2b34.db

A kind of database is known by the version of its program and the names and sizes of its migrations, so another version
never gets it. The program still checks the copy as it checks each database that it opens. Whatever fails here, the
program makes its tables itself.

A process that is killed while it migrates leaves half of the tables, which no later process can use. So `create` has
the tables made and checked in a folder next to the database, which then gets its name in one step.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trainer_lib.base.paths import cache_folder

_FOLDER = "databases"
_JOURNALS = ("-wal", "-shm", "-journal")
_LEFT_S = 3600.0  # a draft that is older belongs to a process that was killed
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """One program's databases."""

    package: str  # the package with the migrations, by the name of its distribution and its import
    migrations: str  # the folder of its migrations, from the package's
    filled: Collection[str]  # tables whose rows a new database has; of all others only the definition is kept

    def template(self) -> Path:
        """The folder of the installed version's tables. Raises OSError if it has no migrations."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise FileNotFoundError(self.package)
        folder = Path(spec.origin).parent / self.migrations
        names = sorted(f"{path.name} {path.stat().st_size}" for path in folder.glob("*.py"))
        if not names:
            raise FileNotFoundError(folder)
        version = metadata.version(self.package)
        digest = hashlib.sha256("\n".join([version, *sorted(self.filled), *names]).encode()).hexdigest()
        return cache_folder(_FOLDER) / f"{self.package}-{version}-{digest[:12]}.db"


@contextlib.contextmanager
def create(kind: Kind, database: Path, make: Callable[[Path], None]) -> Iterator[None]:
    """Hold the lock of a database inside the block, and make the database, in a folder that is there, where none is.

    `make` makes the tables of the file that it gets, or checks those that are there, and closes it.
    """
    database = Path(os.path.realpath(database))
    with (database.parent / f".{database.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            with _drafts(database) as folder:
                _make_checked(kind, folder / database.name, make)
                for ending in _JOURNALS:  # sqlite would apply a removed database's changes to the new one
                    database.with_name(database.name + ending).unlink(missing_ok=True)
                (folder / database.name).replace(database)
        yield


def _make_checked(kind: Kind, draft: Path, make: Callable[[Path], None]) -> None:
    is_copy = place(kind, draft)
    try:
        make(draft)
    except Exception:
        if not is_copy:
            raise
        _log.debug("The kept tables of %s cannot be used; they are made again.", draft.name, exc_info=True)
        kind.template().unlink(missing_ok=True)
        for ending in ("", *_JOURNALS):
            draft.with_name(draft.name + ending).unlink(missing_ok=True)
        is_copy = False
        make(draft)
    if not is_copy:
        keep(kind, draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _drafts(target: Path) -> Iterator[Path]:
    """A folder next to `target` for what will get its name; those that killed processes left are removed."""
    prefix = f".{target.name}-"
    for left in target.parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > _LEFT_S:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
        yield Path(folder)


def place(kind: Kind, database: Path) -> bool:
    """Copy the kept tables to `database`, in one step, unless something is there; return whether it was done."""
    with contextlib.suppress(OSError, sqlite3.Error, metadata.PackageNotFoundError):
        template = kind.template()
        # Changes that a removed database left behind: sqlite would apply them to the copy.
        left = any(database.with_name(database.name + ending).exists() for ending in ("-wal", "-journal"))
        if left or database.exists() or not _is_own(template):
            return False
        with _drafts(database) as folder:
            copy = folder / database.name
            shutil.copyfile(template, copy)
            if not _is_sound(copy):
                template.unlink(missing_ok=True)
                return False
            os.link(copy, database)  # fails where another process was faster
        return True
    return False


def keep(kind: Kind, database: Path) -> None:
    """Save the tables of a database that its program has just made, unless its version's are there already."""
    try:
        template = kind.template()
        if _is_own(template):
            return
        with _drafts(template) as folder:
            draft, compact = folder / "draft.db", folder / "compact.db"
            with (
                contextlib.closing(_open_unchanged(database)) as source,
                contextlib.closing(sqlite3.connect(draft)) as target,
            ):
                source.backup(target)
            _empty(draft, kind.filled, compact)
            with compact.open("rb") as file:
                os.fsync(file.fileno())
            compact.chmod(0o600)
            if _is_sound(compact):
                compact.replace(template)  # two processes write the same
    except (OSError, sqlite3.Error, metadata.PackageNotFoundError) as error:
        _log.debug("The tables of %s are not kept: %s", database, error)


def _empty(database: Path, filled: Collection[str], compact: Path) -> None:
    """Remove all rows but those of the tables `filled`, and write the rest to the file `compact`."""
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("PRAGMA foreign_keys = OFF")
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT NULL").fetchall()
        for (name,) in tables:
            if name not in filled:
                quoted = name.replace('"', '""')
                connection.execute(f'DELETE FROM "{quoted}"')  # noqa: S608 - a name from the database's own catalogue
        connection.execute("VACUUM INTO ?", (str(compact),))


def _is_sound(database: Path) -> bool:
    with contextlib.suppress(sqlite3.Error), contextlib.closing(_open_unchanged(database)) as connection:
        found = connection.execute("PRAGMA quick_check").fetchone()
        versions = connection.execute("SELECT count(*) FROM alembic_version").fetchone()
        return bool(found == ("ok",) and versions == (1,))
    return False


def _open_unchanged(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)


def _is_own(path: Path) -> bool:
    """Whether a file is there that this user alone can have written."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return False
    return about.st_uid == os.getuid() and not about.st_mode & 0o022
