"""`Evaluator`: evaluation and prediction, in the middle of a training or without one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer_lib.base.outputs import EvalLoopOutput, PredictionOutput, speed_metrics
from trainer_lib.data.loading.generators import keep_generators
from trainer_lib.distributed.precision import back_up_weights, full_eval_dtype
from trainer_lib.errors import ConfigError, OutOfMemoryError, TrainflowError, first_line, is_out_of_memory
from trainer_lib.evaluation.evaluation_loop import EvaluationLoop
from trainer_lib.evaluation.metrics import parse_metrics
from trainer_lib.storage import Store
from trainer_lib.trainer.accelerator.slot import unwrap_prepared
from trainer_lib.trainer.loaders import DataMethods
from trainer_lib.trainer.model.seeding import keep_seeds
from trainer_lib.trainer.overrides import is_set, keep_taken

if TYPE_CHECKING:
    from trainer_lib.trainer.internals import Internals
    from trainer_lib.trainer.trainer import Trainer


class Evaluator:
    """Evaluates through the Trainer's methods; it is what `EvaluationLoop` knows of the Trainer."""

    def __init__(self, trainer: Trainer, internals: Internals) -> None:
        self.trainer = trainer
        self.internals = internals
        self._is_keeping_mode = False

    def measure(self, loader: Any, what: str, ignore_keys: list[str] | None, prefix: str) -> EvalLoopOutput:
        """Run the Trainer's evaluation loop, and add its speed to the metrics."""
        trainer, world = self.trainer, self.internals.world
        self.internals.read_signatures()
        # Without metrics to compute there is no point in keeping predictions.
        loss_only = None if what == "Prediction" or trainer.compute_metrics is not None else True
        loop = trainer.prediction_loop if trainer.args.use_legacy_prediction_loop else trainer.evaluation_loop
        started = time.time()
        output = loop(loader, what, prediction_loss_only=loss_only, ignore_keys=ignore_keys, metric_key_prefix=prefix)
        per_round = max(1, world.eval_batch_size(trainer.args) * world.comm.data_parallel.size)
        batches = -(-(output.num_samples or 0) // per_round)
        metrics = dict(output.metrics or {})
        metrics.update(speed_metrics(prefix, started, num_samples=output.num_samples, num_steps=batches))
        return output._replace(metrics=metrics)

    @contextlib.contextmanager
    def mode_kept(self) -> Iterator[None]:
        """Afterwards the model is in the mode that it had; blocks inside this one leave it in evaluation mode.

        A `log` override, and an override of `evaluate` that measures more, thus see a model that evaluates.
        """
        if self._is_keeping_mode:
            yield
            return
        trainer, self._is_keeping_mode = self.trainer, True
        was_training = trainer.model.training
        try:
            yield
        finally:
            self._is_keeping_mode = False
            # Not its optimizer: a save that follows has the weights that were measured. The next step switches it.
            trainer.model.train(was_training)

    @contextlib.contextmanager
    def random_numbers_kept(self) -> Iterator[None]:
        """Afterwards the random generators of this process are where they were."""
        device = self.internals.world.device
        # fork_rng for CUDA alone, because `keep_generators` does the CPU's.
        devices = [device] if device.type == "cuda" else []
        fork = torch.random.fork_rng(devices=devices, enabled=bool(devices))
        with keep_generators(), fork, keep_seeds(self.trainer.model):
            yield

    @property
    def steps_together(self) -> bool:
        """Whether ranks communicate in a prediction step: a sharded model does, and an override may."""
        own = self.internals.signatures.prediction_is_default
        return self.internals.engine.strategy.forward_communicates or (self.internals.comm.world_size > 1 and not own)

    def evaluation_model(self, *, alone: bool = False) -> nn.Module:
        """The model in evaluation mode; outside training cast as a whole when the arguments ask for it.

        `alone`: its forward must not wait for other ranks; ConfigError where it has to.
        """
        trainer, engine = self.trainer, self.internals.engine
        model = engine.strategy.inference_model(trainer.model_wrapped, alone=alone)
        dtype = full_eval_dtype(trainer.args)
        if dtype is not None and not trainer.is_in_train:
            model = model.to(dtype=dtype)
        if trainer.place_model_on_device:
            trainer._move_model_to_device(trainer.model, self.internals.world.device)
        engine.set_optimizer_mode("eval")
        return model.eval()

    def spool_folder(self) -> Path | None:
        """The run's folder when it is on a local disk: predictions are spooled there; None for the temporary folder."""
        given = self.trainer.args.output_dir
        store = None if given is None else Store.open(given, field="output_dir")
        folder = store.local_path() if store is not None and store.is_local else None
        return folder if folder is not None and folder.is_dir() else None


def _refuse_own_gathering(gather: Any) -> None:
    """Raise ConfigError for a function that this loop would not call; those of the accelerator do what it does."""
    if getattr(getattr(gather, "func", gather), "__name__", None) not in ("gather", "gather_for_metrics"):
        what = "The evaluation loop gathers predictions by itself, so this function would not be called."
        remedy = "Set it to accelerator.gather or accelerator.gather_for_metrics, or override evaluation_loop."
        raise ConfigError(
            what, field="gather_function", value=getattr(gather, "__name__", type(gather).__name__), remedy=remedy
        )


class EvaluationMethods(DataMethods):
    """Evaluation, prediction, and what training asks of them."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate on a dataset, the set of that name, or the Trainer's own; log and return the metrics. Collective.

        A dict of sets (given, or the Trainer's own) is evaluated set by set; the name of each becomes part of its
        metrics' names. Every rank gets the same metrics; `compute_metrics` runs on rank 0.

        Args:
            eval_dataset: a dataset, a dict of them by name, or a name in the Trainer's dict.
            ignore_keys: outputs of the model that are left out of predictions.
            metric_key_prefix: prefix of the metrics' names.
        """
        internals = self._trainflow
        metrics: dict[str, float] = {}
        sets = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(sets, Mapping):
            for name, dataset in sets.items():
                chosen = name if eval_dataset is None else dataset  # by name: persistent workers are found again
                # By keyword: overrides have parameters of their own in between.
                one_set = {"ignore_keys": ignore_keys, "metric_key_prefix": f"{metric_key_prefix}_{name}"}
                metrics.update(self.evaluate(eval_dataset=chosen, **keep_taken(self.evaluate, one_set)))
            return metrics
        with internals.evaluator.mode_kept(), self._memory_tracker.stage("eval", metrics):
            loader = self.get_eval_dataloader(eval_dataset)
            output = internals.evaluator.measure(loader, "Evaluation", ignore_keys, metric_key_prefix)
            metrics.update(output.metrics or {})
            internals.log(metrics)
            internals.events.fire("on_evaluate", metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Predict a dataset, and measure the predictions when it has labels. Collective.

        Returns:
            On rank 0, predictions and labels as memory-mapped arrays ``[samples, ...]``, padded on the right with -100
            where batches differ in width; None on the other ranks. The metrics, equal on every rank.
        """
        internals = self._trainflow
        metrics: dict[str, float] = {}
        with internals.evaluator.mode_kept(), self._memory_tracker.stage("test", metrics):
            loader = self.get_test_dataloader(test_dataset)
            output = internals.evaluator.measure(loader, "Prediction", ignore_keys, metric_key_prefix)
            metrics.update(output.metrics or {})
            internals.events.fire("on_predict", metrics)
        return PredictionOutput(output.predictions, output.label_ids, metrics)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """One pass over a loader: predictions and labels ``[samples, ...]``, metrics, number of samples.

        The model is afterwards in the mode and precision that it had.
        """
        internals, evaluator = self._trainflow, self._trainflow.evaluator
        # The default is not read: it makes the accelerator, and a subclass may have something else under that name.
        if is_set(self, "gather_function"):
            _refuse_own_gathering(self.gather_function)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        internals.forward.past = None
        # As in transformers: an evaluation inside training takes the weights as they are.
        casts = full_eval_dtype(self.args) is not None and not self.is_in_train
        restore = back_up_weights(self.model) if casts else None
        self.callback_handler.eval_dataloader = dataloader
        try:
            with evaluator.mode_kept(), torch.no_grad():
                keeps = description == "Prediction"
                loop = EvaluationLoop(evaluator, loss_only=loss_only, ignore_keys=ignore_keys, keeps_predictions=keeps)
                return loop.run(unwrap_prepared(dataloader), metric_key_prefix)
        except Exception as error:
            if isinstance(error, TrainflowError) or not is_out_of_memory(error):
                raise
            what = f"Memory ran out in the evaluation: {first_line(error)}"
            remedy = "Lower it, or set eval_accumulation_steps where predictions are kept."
            raise OutOfMemoryError(
                what, field="per_device_eval_batch_size", value=self.args.per_device_eval_batch_size, remedy=remedy
            ) from error
        finally:
            if restore is not None:
                restore()
            internals.engine.strategy.after_inference(self.model_wrapped)
            internals.forward.past = None

    def prediction_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Old name of `evaluation_loop`, called when `use_legacy_prediction_loop` is set."""
        return self.evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        """Evaluate in the middle of training, whose random numbers stay; report to a search, step a metric schedule."""
        evaluator = self._trainflow.evaluator
        with evaluator.random_numbers_kept(), evaluator.mode_kept():
            metrics = self.evaluate(**keep_taken(self.evaluate, {"ignore_keys": ignore_keys_for_eval}))
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if not skip_scheduler:
            self._trainflow.engine.step_metric_schedule(metrics)
        return metrics

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        """In a search, report an evaluation of the trial. Raises TrialPruned, on every rank, when it is stopped."""
        self._trainflow.trials.report(step, metrics)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether these metrics are the best so far, which is then noted in the state; a non-finite value never is.

        Raises ConfigError when `metric_for_best_model` is not among them.
        """
        watched, run = self.args.metric_for_best_model, self._trainflow.run
        if watched is None:
            return False
        name = watched if watched.startswith("eval_") else f"eval_{watched}"
        if name not in metrics:
            what = f"The evaluation gave only {', '.join(metrics)}."
            raise ConfigError(what, field="metric_for_best_model", value=watched, remedy="Name one of them.")
        # An override of `evaluate` may return numbers of numpy.
        value, best = parse_metrics({name: metrics[name]})[name], self.state.best_metric
        # Only NaN differs from itself.
        if value != value or abs(value) == float("inf") or (run is not None and run.history.in_trouble):
            return False
        if best is not None and not (value > best if self.args.greater_is_better else value < best):
            return False
        self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        return True
