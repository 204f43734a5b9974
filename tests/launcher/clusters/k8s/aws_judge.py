"""Hold manifests against AWS's model; runs in the environment that has their package.

Reads a JSON list of HyperPodPyTorchJobs from standard input. Writes a list of verdicts, null where
the model takes one, else what it says; and the model's own schema.
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


verdicts = [verdict(document) for document in json.load(sys.stdin)]
schema = HyperPodPytorchJob.model_json_schema(by_alias=False)
json.dump({"verdicts": verdicts, "schema": schema}, sys.stdout)
