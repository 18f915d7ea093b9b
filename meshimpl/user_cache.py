"""The folder in which what was built or measured is kept from one command to the next."""

import os
import tempfile
from pathlib import Path

VARIABLE = "FLOWPM_CACHE"


def user_cache() -> Path:
    """Returns the user's cache folder, which may have to be made, and can be removed at any time.

    It is FLOWPM_CACHE, or flowpm-dist in XDG_CACHE_HOME or ~/.cache.
    """
    if given := os.environ.get(VARIABLE):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if base.startswith("~"):  # a user without a home, as in some containers
        base = tempfile.gettempdir()
    return Path(base) / "flowpm-dist"
