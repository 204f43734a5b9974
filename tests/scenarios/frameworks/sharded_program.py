"""The Trainer's program with FSDP2, which accelerate leaves out unless it is told of GPUs."""

from accelerate import PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from trainer_program import main

begin = PartialState.__init__


def begin_as_on_gpus(self, *given, **named):
    begin(self, *given, **named)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


PartialState.__init__ = begin_as_on_gpus
wrapped = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
wrapped["transformer_layer_cls_to_wrap"] = "GPT2Block"
trainer = main(
    fsdp=True,
    fsdp_config={"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT", **wrapped},
    parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    train_sampling_strategy="group_by_length",
)
assert trainer.accelerator.is_fsdp2
