"""The same with samples grouped by length, workers that last, and the best model at the end."""

from trainer_program import main

main(
    train_sampling_strategy="group_by_length",
    dataloader_persistent_workers=True,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    eval_steps=2,
    save_steps=2,
    save_total_limit=2,
)
