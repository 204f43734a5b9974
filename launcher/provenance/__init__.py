"""Where each value of a config comes from: which file and line, or which override, has set it."""
