"""What the rules of tests/test_tidy.py allow: bounds, and the exceptions that are left.

A list only becomes shorter: the rules fail where an entry is not needed any more.
"""

from __future__ import annotations

MODULES_MAX = 15
LARGE_FOLDERS = {
    "resilience/data": 26,
    "resilience/tiered": 26,
    "resilience/tiered/memoryd": 34,
}
"""Folders that are to be cut into rooms, with how many modules they hold."""
PUBLIC_API = {
    "resilience.data.datamodule": ("docs/data.md", "CachedDataModule"),
    "resilience.frameworks.huggingface": ("docs/huggingface.md", "RecoveryMixin"),
    "resilience.frameworks.lightning": ("docs/lightning.md", "RecoveringDDPStrategy"),
    "resilience.testing.async_group": ("docs/architecture.md", "fakes that ship"),
    "resilience.testing.network": ("docs/architecture.md", "resilience.testing.network"),
    "resilience.tiered.aws_bucket": ("docs/tiered.md", "BucketSource"),
    "resilience.tiered.aws_reader": ("docs/tiered.md", "AwsReader"),
}
"""Modules for the users of our packages, with the page that tells them, and its words."""
FOREIGN_TARGETS = {
    "resilience/agent/options.py": (
        "options are completed before anybody has them",
        (
            "options.grace_s options.local_addr options.node_name options.program options.tls "
            "options.rdzv_endpoint options.rdzv_id options.spares_per_node options.term_deadline_s"
        ),
    ),
    "resilience/comm/reducer.py": (
        "torch's way to give a parameter its gradient",
        "parameter.grad",
    ),
    "resilience/comm/tree_reducer.py": (
        "torch's way to give a parameter its gradient",
        "parameter.grad",
    ),
    "resilience/tiered/dcp/writer.py": (
        "DCP returns from its save the metadata that it has given to the writer",
        "metadata.storage_data metadata.storage_meta metadata.version",
    ),
    "resilience/data/failure.py": (
        "the exception is made here, by a class that a variable holds",
        "error.args",
    ),
    "resilience/protection/batches.py": (
        "accelerate has no other way to leave a broadcast out",
        "loader.rng_types",
    ),
    "resilience/frameworks/callback_calls.py": (
        "a Trainer's callbacks have no other way to be called once",
        "handler.call_event self._handler.call_event",
    ),
    "resilience/frameworks/huggingface.py": (
        "a Trainer's loop counts in the Trainer",
        (
            "model.find_unused_parameters trainer.current_flos "
            "trainer.current_gradient_accumulation_steps trainer.state.best_model_checkpoint "
            "trainer.state.epoch trainer.state.global_step"
        ),
    ),
    "resilience/frameworks/lightning.py": (
        "what a broken step has left in Lightning's Trainer is put back",
        "self._trainer.strategy.model.require_backward_grad_sync self._trainer.training",
    ),
    "resilience/frameworks/lightning_calls.py": (
        "Lightning's callbacks and counts tell its loop of a stop this way",
        "each.completed self._trainer.should_stop",
    ),
    "resilience/frameworks/lightning_state.py": (
        "what Lightning's Trainer has decided is put back",
        "self._trainer.should_stop",
    ),
    "resilience/frameworks/trainer_state.py": (
        "what a Trainer has counted is put back",
        "trainer.current_flos trainer.state.log_history",
    ),
    "resilience/state/shared.py": (
        "the ways of torch and numpy to move a tensor and to protect an array",
        "each.data part.flags.writeable tensor.data",
    ),
    "resilience/comm/bindings.py": (
        "Python's way to change what a function refers to",
        "holder.cell_contents",
    ),
    "recipes_training/megatron/library.py": (
        "what a library calls otherwise than it comes",
        (
            "buffers.dist_all_gather_func buffers.dist_reduce_scatter_func "
            "module.dist_all_gather_func module.dist_reduce_scatter_func"
        ),
    ),
    "recipes_training/megatron/model.py": (
        (
            "Megatron's ways to choose layers, and to leave reductions to the last micro batch; "
            "torch's way to give a tensor other memory"
        ),
        (
            "config.no_sync_func layer.submodules.input_layernorm "
            "layer.submodules.pre_mlp_layernorm main.data"
        ),
    ),
    "recipes_training/megatron/step.py": (
        "Megatron has no call that forgets a step",
        "group.grad_reduce_handle group.is_first_batch group.per_param_grad_ready_counts",
    ),
    "recipes_training/megatron/trainer.py": (
        "Megatron has no call that has parameters gathered anew",
        "group.param_gather_dispatched group.param_gather_handle",
    ),
    "recipes_training/torch/model.py": (
        "the ways of torch to tie, replace and wrap a module",
        "core.lm_head.weight core.model.rotary_emb layer.forward",
    ),
    "recipes_training/torch/rebind.py": (
        "FSDP2 has no call that takes another group",
        (
            "info.replicate_mesh_rank info.replicate_process_group info.shard_process_group "
            "param.sharded_param.grad"
        ),
    ),
    "recipes_training/torch/trainer.py": (
        "Transformers' way to name the class in config.json",
        "config.architectures",
    ),
    "recipes_training/trainer.py": (
        "torch's optimizers take options this way",
        "optimizer.param_groups",
    ),
    "resilience/protection/fsdp_step.py": (
        "FSDP2 has no call that forgets a step",
        (
            "comm.all_gather_state comm.reduce_scatter_state context.iter_forward_root "
            "context.post_backward_final_callback_queued group.all_reduce_grads "
            "param._unsharded_param.grad param.unsharded_accumulated_grad"
        ),
    ),
    "resilience/protection/models.py": (
        "DDP has no call that lets its reducer go",
        "ddp.logger ddp.reducer",
    ),
}
"""By file, the attributes of others that it assigns to: why, and which."""
