"""The processes of a node: how they are forked, given ranks, watched and heard."""
