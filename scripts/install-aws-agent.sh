#!/bin/sh
# Makes an environment that holds AWS's own agent for HyperPod's operator, as a judge for tests.
#
#   install-aws-agent.sh [PYTHON [FOLDER]]
#
# Defaults: .venv/bin/python and .venv-aws-agent, both at the repository's root.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
exec "$root/scripts/beside-torch.sh" "${1:-$root/.venv/bin/python}" "${2:-$root/.venv-aws-agent}" \
    hyperpod_elastic_agent.run \
    'fastapi==0.128.0 uvicorn==0.40.0 psutil==7.2.2' \
    'hyperpod-elastic-agent==1.1.3'
