"""The Trainer: it sequences; strategies, loaders, optimizers, evaluation and checkpoints compute.

The class is put together from one file per concern, each a set of public methods that a subclass may override:
`base` (construction, callbacks, ranks), `data` (loaders), `steps` (forward, loss, backward, prediction),
`optimization`, `evaluate`, `saving`, `reporting`, `preparing` (before the first step), `loop` (train), and `searching`.
"""

from __future__ import annotations

from trainer_lib.trainer.searching import SearchMixin


class Trainer(SearchMixin):
    """Trains, evaluates and predicts with any `torch.nn.Module` whose forward takes a batch by keyword.

    Args:
        model: the module; its forward returns a tuple, a dict or a `ModelOutput` with the loss first (or under "loss")
            when labels are given. Or `model_init`, which makes a fresh one for every training.
        args: the arguments; a basic set with output_dir "tmp_trainer" when not given.
        data_collator: list of samples -> batch; `DataCollatorWithPadding` when the processing class can pad, else
            `default_data_collator`.
        train_dataset: map-style or iterable.
        eval_dataset: a dataset, or a dict of them by name.
        processing_class: tokenizer or processor, saved with the model. Old name: tokenizer.
        model_init: `() -> model` or `(trial) -> model`.
        compute_loss_func: `(outputs, labels, num_items_in_batch) -> loss`; the last may be left out.
        compute_metrics: `EvalPrediction -> {name: number}`.
        callbacks: added to the default ones.
        optimizers: (optimizer, schedule) to use instead of those the arguments ask for.
        optimizer_cls_and_kwargs: the optimizer's class and settings, instead of `optim` and `optim_args`.
        preprocess_logits_for_metrics: `(logits, labels) -> logits`, applied batch by batch before they are kept.

    Raises ConfigError or DataError for whatever can be known to be wrong before the first step.
    """


__all__ = ["Trainer"]
