"""Environments for other codes, kept in the user's cache."""

from __future__ import annotations

import hashlib
import platform
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from meshimpl.horovod_wheel.wheel import BuildError, run
from meshimpl.launch import user_cache


def environment(requirements: Path, name: str) -> Path:
    """The Python of an environment with these packages, made where it is missing.

    Args:
        requirements: file of pinned packages.
        name: beginning of the name of the environment's folder.

    Raises:
        SystemExit: it could not be made; says why.
    """
    facts = f"{requirements.read_text()}{platform.machine()}{sys.version_info[:2]}"
    digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
    folder = user_cache() / f"{name}-{digest}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists() and python.exists():
        return python
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
    try:
        run(f"making {folder}", [sys.executable, "-m", "venv", "--clear", str(folder)], log=log)
        run(
            f"installing {requirements.name} (a minute or a few)",
            [*pip, "--progress-bar", "off", "--requirement", str(requirements)],
            log=log,
        )
    except BuildError as error:
        raise SystemExit(
            f"{error}\n"
            "If the package registry cannot be reached from here, set pip up for one that can "
            "(pip config, or PIP_INDEX_URL) and run this again."
        ) from None
    complete.touch()
    return python
