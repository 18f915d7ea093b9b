"""The program with one more job, for processes of their own."""

from flowpm_dist.jobs.job import JOBS

JOBS["count"] = "counting.work:CountJob"

from flowpm_dist.cli.program import main  # noqa: E402 - its commands are those of the register

if __name__ == "__main__":
    main()
