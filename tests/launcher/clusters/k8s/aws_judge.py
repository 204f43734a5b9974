"""Hold manifests against AWS's model; runs in the environment that has their package.

Reads a JSON list of HyperPodPyTorchJobs from standard input and writes a list
of verdicts: null where the model takes one, else what it says.
"""

from __future__ import annotations

import json
import sys
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sagemaker.hyperpod.training.hyperpod_pytorch_job import HyperPodPytorchJob


def verdict(document: dict) -> str | None:
    fields = {"metadata": document["metadata"], **document["spec"]}
    try:
        # Their field names are camel case only under this option.
        HyperPodPytorchJob.model_validate(fields, by_name=True)
    except ValueError as error:
        return str(error)
    return None


json.dump([verdict(document) for document in json.load(sys.stdin)], sys.stdout)
