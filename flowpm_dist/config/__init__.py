"""Run files: from text to checked objects."""
