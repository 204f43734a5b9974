"""Make one Job of a recipe and its overrides: find the files, compose them, say what is wrong."""
