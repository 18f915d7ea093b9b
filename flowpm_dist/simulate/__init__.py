"""The job `flowpm-dist simulate`: a run file becomes a universe, with its snapshot and spectra."""
