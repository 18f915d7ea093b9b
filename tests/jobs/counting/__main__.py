"""The program with one more job and one more format, for processes of their own."""

import importlib.util
import sys
from pathlib import Path

# The package's register of formats, read from its file with one more line.
NAME = "flowpm_dist.io.particle_formats"
PATH = Path(importlib.util.find_spec("flowpm_dist").origin).parent / "io" / "particle_formats.py"
BEGIN = "PARTICLE_FORMATS = {\n"
LINE = '    "text": ParticleFormat("snapshot.text", "counting.text_format", "lines"),\n'
SPEC = importlib.util.spec_from_file_location(NAME, PATH)
sys.modules[NAME] = formats = importlib.util.module_from_spec(SPEC)
exec(PATH.read_text().replace(BEGIN, BEGIN + LINE), vars(formats))

from flowpm_dist.jobs.job import JOBS  # noqa: E402

JOBS["count"] = "counting.work:CountJob"

from flowpm_dist.cli.program import main  # noqa: E402 - its commands come from the register

if __name__ == "__main__":
    main()
