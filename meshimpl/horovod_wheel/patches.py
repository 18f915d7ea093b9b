"""The edits of Horovod's source, which stand in patches.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Patch:
    """One edit of Horovod's source: every occurrence of `old` in `file` becomes `new`."""

    file: str
    old: str
    new: str
    flavours: tuple[str, ...] = ("cpu", "nccl")


EXCHANGE = Path(__file__).with_name("exchange.cc")
"""A source file that is added to Horovod's: operations of our own."""
_TEXT = Path(__file__).with_name("patches.toml").read_text(encoding="utf-8")
PATCHES = tuple(Patch(**edit) for edit in tomllib.loads(_TEXT)["patches"])
