"""What HyperPod's operator sends: the bodies of its requests, checked field by field. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, IPvAnyAddress

NODES_MAX = 4096
_Text = Annotated[str, Field(max_length=1024)]
_Rank = Annotated[int, Field(ge=0, lt=NODES_MAX)]
_Seconds = Annotated[float, Field(gt=0, le=1e6)]
# The operator may leave it to the agents.
_Port = Annotated[int, BeforeValidator(lambda port: port or 0), Field(ge=0, lt=65536)]


class _Body(BaseModel):
    # An operator that is newer than this agent may send more.
    model_config = ConfigDict(frozen=True, extra="ignore")


class RankAddress(_Body):
    """Where the node of a rank is."""

    rank: _Rank
    ip: IPvAnyAddress


class LogRule(_Body):
    """A rule by which a run that shows no step counts as one that hangs; seconds."""

    name: _Text
    start_s: _Seconds | None = Field(None, alias="expectedStartCutOffInSeconds")
    recurring_s: _Seconds | None = Field(None, alias="expectedRecurringFrequencyInSeconds")


class UpdateBody(_Body):
    """The node's place in the run."""

    rank: _Rank
    nnodes: Annotated[int, Field(ge=1, le=NODES_MAX)]
    faultCount: Annotated[int, Field(ge=0, lt=2**31)]  # noqa: N815 - the protocol's name
    master_addr: Annotated[str, Field(min_length=1, max_length=253)]
    master_port: _Port
    log_monitoring_configuration: tuple[LogRule, ...] = ()
    ipVersion: _Text | None = None  # noqa: N815
    rankIps: Annotated[tuple[RankAddress, ...], Field(max_length=NODES_MAX)] = ()  # noqa: N815
    spare: bool = False


class StartBody(UpdateBody):
    """The node's place in the run that is to start; our agents find what earlier starts saved."""


class StopBody(_Body):
    """How the node's part of the run is to end."""

    is_graceful: bool = False
    timeout: _Seconds | None = None


BODIES: dict[str, type[UpdateBody] | type[StopBody]] = {
    "/start": StartBody,
    "/update": UpdateBody,
    "/stop": StopBody,
}
