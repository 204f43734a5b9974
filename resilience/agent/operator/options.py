"""Options of an agent whose runs an operator starts and stops."""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import BaseModel, IPvAnyNetwork, PlainValidator

from resilience.arguments import read_token
from resilience.settings import Port, Whole


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


class OperatorOptions(BaseModel):
    """Options of an agent under HyperPod's operator."""

    operator_port: Port | None = None
    """Port at which HyperPod's operator says when the run starts and stops, and where its nodes
    are; without it the run starts at once."""
    operator_from: tuple[IPvAnyNetwork, ...] = ()
    """Network whose addresses may send commands to --operator-port, as 10.0.0.0/8 (default:
    loopback alone)."""
    operator_token_file: Annotated[str | None, PlainValidator(read_token)] = None
    """File with a token that each such command brings as Authorization: Bearer (default: none)."""
    operator_peer_port: Port | None = None
    """Port at which the nodes' checkpoint daemons find each other under the addresses that the
    operator gives; --node-name is the address of the node then (default: no daemon knows
    another)."""
    progress_steps: Whole | None = None
    """Steps of the whole run, 0 where their number is not known; with it the newest step is told
    to Kubeflow's controller, where this one has given the pod KUBEFLOW_TRAINER_SERVER_URL
    (default: nothing is told, as of a program whose output shows no steps)."""
    operator_link: Annotated[tuple[int, ...] | None, PlainValidator(_numbers)] = None
    """Of no use by hand: what an agent that answers the operator tells the agent of a run."""


def refuse_operator(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the process where options do not go with --operator-port."""
    port, endpoint = options.operator_port, ",".join(options.rdzv_endpoint or ())
    if port is not None and not options.operator_link and endpoint:
        parser.error(f"argument --rdzv-endpoint: {endpoint} is not allowed with --operator-port")
    if port is not None and port == options.operator_peer_port:
        parser.error(f"argument --operator-peer-port: {port} is --operator-port; want another one")
