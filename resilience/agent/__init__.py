"""One process a node: it starts, watches and replaces the node's workers."""
