"""The door for an operator of HyperPod, which starts and stops a node's part of a run over HTTP."""
