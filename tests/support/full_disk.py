"""Files that take no more than some bytes, as on a full disk.

Python writes no bytecode meanwhile: it would be cut short, and believed by who comes later.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NO_BYTECODE = {"PYTHONDONTWRITEBYTECODE": "1"}


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Inside, files of this process take no more than this [bytes]."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = written


def run_on_disk_of(
    size: int, words: Sequence[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command whose files take no more than `size` [bytes], with environment variables."""
    return subprocess.run(
        words,
        env={**os.environ, **NO_BYTECODE, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
