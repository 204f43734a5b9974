"""Bodies of the requests of HyperPod's operator, checked field by field. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, IPvAnyAddress, model_validator

NODES_MAX = 4096
_Text = Annotated[str, Field(max_length=1024)]
_Whole = Annotated[int, Field(strict=True)]
_Rank = Annotated[_Whole, Field(ge=0, lt=NODES_MAX)]
_Seconds = Annotated[float, Field(gt=0, le=1e6)]
# The operator may leave it to the agents.
_Port = Annotated[
    int, BeforeValidator(lambda port: 0 if port == "" else port), Field(ge=0, lt=65536)
]
# An empty list of a program in Go.
_NoneIsEmpty = BeforeValidator(lambda values: () if values is None else values)


class _Body(BaseModel):
    # An operator that is newer than this agent may send more.
    model_config = ConfigDict(frozen=True, extra="ignore")


class RankAddress(_Body):
    """Address of the node of a rank."""

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
    nnodes: Annotated[_Whole, Field(ge=1, le=NODES_MAX)]
    faultCount: Annotated[_Whole, Field(ge=0, lt=2**31)]  # noqa: N815 - the protocol's name
    master_addr: Annotated[str, Field(min_length=1, max_length=253)]
    master_port: _Port
    log_monitoring_configuration: Annotated[tuple[LogRule, ...], _NoneIsEmpty] = ()
    ipVersion: _Text | None = None  # noqa: N815
    rankIps: Annotated[  # noqa: N815
        tuple[RankAddress, ...], _NoneIsEmpty, Field(max_length=NODES_MAX)
    ] = ()
    spare: bool = False

    @model_validator(mode="after")
    def _refuse_impossible(self) -> UpdateBody:
        ranks = [each.rank for each in self.rankIps]
        num_ips = len({each.ip for each in self.rankIps})
        # The addresses of spares may follow those of the run's nodes.
        limit = max(self.nnodes, len(ranks))
        if not self.spare and self.rank >= self.nnodes:
            raise ValueError(
                f"rank {self.rank} is not allowed with nnodes {self.nnodes}; want less"
            )
        if min(num_ips, len({*ranks})) < len(ranks):
            raise ValueError(f"rankIps has ranks {ranks}; allowed: each rank and each ip once")
        if ranks and not self.spare and self.rank not in ranks:
            raise ValueError(f"rankIps has ranks {ranks}; allowed: rank {self.rank} among them")
        if (most := max(ranks, default=0)) >= limit and most != self.rank:
            raise ValueError(f"rankIps has rank {most}; allowed: less than {limit}")
        return self


class StartBody(UpdateBody):
    """The node's place in the run that is to start; our agents find what earlier starts saved."""


class StopBody(_Body):
    """An order to end the node's part of the run."""

    is_graceful: bool | None = None
    timeout: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """Seconds; 0 counts as none given: a run that is killed at once would save nothing."""


BODIES: dict[str, type[UpdateBody] | type[StopBody]] = {
    "/start": StartBody,
    "/update": UpdateBody,
    "/stop": StopBody,
}
