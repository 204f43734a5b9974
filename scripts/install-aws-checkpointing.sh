#!/bin/sh
# Makes an environment that holds AWS's own client of tiered checkpoints, as a judge for tests.
#
#   install-aws-checkpointing.sh [PYTHON [FOLDER]]
#
# Defaults: .venv/bin/python and .venv-aws-tiered, both at the repository's root.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
exec "$root/scripts/beside-torch.sh" "${1:-$root/.venv/bin/python}" "${2:-$root/.venv-aws-tiered}" \
    amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem \
    'boto3==1.40.0 requests==2.32.5 tenacity==9.1.2 xxhash==3.6.0' \
    'amzn-sagemaker-checkpointing==1.1.3 s3torchconnector==1.5.0 s3torchconnectorclient==1.5.0'
