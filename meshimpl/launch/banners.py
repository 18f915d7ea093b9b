"""Leaving out what mpirun prints about the end of a job that has told its own."""

from __future__ import annotations

import re

_RULE = re.compile(rb"-{60,}\r?\n")
_MAY_BE_RULE = re.compile(rb"-{2,}\r?\Z|-?\Z")
_TOPICS = re.compile(
    rb"MPI_ABORT was invoked on rank"
    rb"|prterun has exited due to process rank .* calling"
    rb"|prterun detected that one or more processes exited with non-zero status"
)
_LINES = re.compile(
    rb"\s*\n|MPI_ABORT was invoked|\s+Proc: |\s+Errorcode: |NOTE: invoking MPI_ABORT"
    rb"|You may or may not see|exactly when Open MPI|prterun (has exited|detected)"
    rb"|\"?abort\"?|terminated by signals|thus causing the job|\s+Process name: |\s+Exit code: "
    rb"|in communicator "
)
_LONGEST = 20  # lines of a banner


class WithoutBanners:
    """What mpirun and its ranks print, without Open MPI's banners on an exit status or MPI_ABORT.

    A rank that ends a job has said why, and the process that started the job says what is left to
    say. All other banners, such as that a program is not found, are passed on.
    """

    def __init__(self) -> None:
        self._part = b""  # of a line, not passed on yet
        self._block: list[bytes] | None = None  # lines since a rule
        self._inside_line = False

    def feed(self, data: bytes) -> bytes:
        """Returns what can be passed on after these bytes."""
        *lines, self._part = re.split(rb"(?<=\n)", self._part + data)
        out = b"".join(map(self._line, lines))
        if self._block is None and (self._inside_line or not _MAY_BE_RULE.match(self._part)):
            # A line that is redrawn has no end for a long time.
            self._inside_line |= bool(self._part)
            out, self._part = out + self._part, b""
        return out

    def end(self) -> bytes:
        """Returns what was kept back."""
        kept, self._block = b"".join(self._block or []) + self._part, None
        self._part = b""
        return kept

    def _line(self, line: bytes) -> bytes:
        if self._inside_line:
            self._inside_line = False
            return line
        is_rule = _RULE.fullmatch(line) is not None
        if self._block is None:
            if not is_rule:
                return line
            self._block = [line]
            return b""
        self._block.append(line)
        if not is_rule and len(self._block) < _LONGEST:
            return b""
        block, self._block = self._block, None
        if not (is_rule and _TOPICS.search(b"".join(block))):
            return b"".join(block)
        # Ranks may have written between its lines.
        return b"".join(line for line in block[1:-1] if not _LINES.match(line))
