"""A PyTorch trainer library, independent of any orchestrator. Importing it does not import torch.

`_NAMES` lists every public name with its module, which is imported when the name is first used. The imports under
`TYPE_CHECKING` and `__all__` repeat the list for type checkers and editors, which cannot follow `__getattr__`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_lib.arguments import (
        ArgumentParser,
        HfArgumentParser,
        HubStrategy,
        IntervalStrategy,
        OptimizerNames,
        SaveStrategy,
        SchedulerType,
        Seq2SeqTrainingArguments,
        TFTrainingArguments,
        TrainingArguments,
    )
    from trainer_lib.arguments.enums import HPSearchBackend
    from trainer_lib.callbacks.base import CallbackHandler, TrainerCallback
    from trainer_lib.callbacks.early_stopping import EarlyStoppingCallback
    from trainer_lib.callbacks.flow import DefaultFlowCallback
    from trainer_lib.callbacks.progress_bar import PrinterCallback, ProgressCallback
    from trainer_lib.checkpoint.catalogue import get_last_checkpoint
    from trainer_lib.data.collators import (
        DataCollator,
        DataCollatorForMultipleChoice,
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        DefaultDataCollator,
        default_data_collator,
    )
    from trainer_lib.data.masking import (
        DataCollatorForLanguageModeling,
        DataCollatorForPermutationLanguageModeling,
        DataCollatorWithFlattening,
    )
    from trainer_lib.installation import install, uninstall
    from trainer_lib.keras_models.tf_trainer import TFTrainer
    from trainer_lib.model_folder.loaded import LoadedModel, load_model
    from trainer_lib.outputs import BestRun, EvalLoopOutput, EvalPrediction, ModelOutput, PredictionOutput, TrainOutput
    from trainer_lib.search.backends import default_hp_space_ray
    from trainer_lib.search.base import default_compute_objective, default_hp_space_optuna
    from trainer_lib.seq2seq import Seq2SeqTrainer
    from trainer_lib.state import ExportableState, TrainerControl, TrainerState
    from trainer_lib.trackers.vendors import (
        AzureMLCallback,
        ClearMLCallback,
        CodeCarbonCallback,
        CometCallback,
        DagsHubCallback,
        DVCLiveCallback,
        FlyteCallback,
        JsonlCallback,
        KubeflowCallback,
        MLflowCallback,
        NeptuneCallback,
        SwanLabCallback,
        TensorBoardCallback,
        TrackioCallback,
        WandbCallback,
    )
    from trainer_lib.trainer import Trainer
    from trainer_lib.trainer.seeding import enable_full_determinism, set_seed

# Name -> module. Written out, because looking into a module would import torch.
_NAMES = {
    "ArgumentParser": "trainer_lib.arguments",
    "AzureMLCallback": "trainer_lib.trackers.vendors",
    "BestRun": "trainer_lib.outputs",
    "CallbackHandler": "trainer_lib.callbacks.base",
    "ClearMLCallback": "trainer_lib.trackers.vendors",
    "CodeCarbonCallback": "trainer_lib.trackers.vendors",
    "CometCallback": "trainer_lib.trackers.vendors",
    "DVCLiveCallback": "trainer_lib.trackers.vendors",
    "DagsHubCallback": "trainer_lib.trackers.vendors",
    "DataCollator": "trainer_lib.data.collators",
    "DataCollatorForLanguageModeling": "trainer_lib.data.masking",
    "DataCollatorForMultipleChoice": "trainer_lib.data.collators",
    "DataCollatorForPermutationLanguageModeling": "trainer_lib.data.masking",
    "DataCollatorForSeq2Seq": "trainer_lib.data.collators",
    "DataCollatorForTokenClassification": "trainer_lib.data.collators",
    "DataCollatorWithFlattening": "trainer_lib.data.masking",
    "DataCollatorWithPadding": "trainer_lib.data.collators",
    "DefaultDataCollator": "trainer_lib.data.collators",
    "DefaultFlowCallback": "trainer_lib.callbacks.flow",
    "EarlyStoppingCallback": "trainer_lib.callbacks.early_stopping",
    "EvalLoopOutput": "trainer_lib.outputs",
    "EvalPrediction": "trainer_lib.outputs",
    "ExportableState": "trainer_lib.state",
    "FlyteCallback": "trainer_lib.trackers.vendors",
    "HPSearchBackend": "trainer_lib.arguments.enums",
    "HfArgumentParser": "trainer_lib.arguments",
    "HubStrategy": "trainer_lib.arguments",
    "IntervalStrategy": "trainer_lib.arguments",
    "JsonlCallback": "trainer_lib.trackers.vendors",
    "KubeflowCallback": "trainer_lib.trackers.vendors",
    "LoadedModel": "trainer_lib.model_folder.loaded",
    "MLflowCallback": "trainer_lib.trackers.vendors",
    "ModelOutput": "trainer_lib.outputs",
    "NeptuneCallback": "trainer_lib.trackers.vendors",
    "OptimizerNames": "trainer_lib.arguments",
    "PredictionOutput": "trainer_lib.outputs",
    "PrinterCallback": "trainer_lib.callbacks.progress_bar",
    "ProgressCallback": "trainer_lib.callbacks.progress_bar",
    "SaveStrategy": "trainer_lib.arguments",
    "SchedulerType": "trainer_lib.arguments",
    "Seq2SeqTrainer": "trainer_lib.seq2seq",
    "Seq2SeqTrainingArguments": "trainer_lib.arguments",
    "SwanLabCallback": "trainer_lib.trackers.vendors",
    "TFTrainer": "trainer_lib.keras_models.tf_trainer",
    "TFTrainingArguments": "trainer_lib.arguments",
    "TensorBoardCallback": "trainer_lib.trackers.vendors",
    "TrackioCallback": "trainer_lib.trackers.vendors",
    "TrainOutput": "trainer_lib.outputs",
    "Trainer": "trainer_lib.trainer",
    "TrainerCallback": "trainer_lib.callbacks.base",
    "TrainerControl": "trainer_lib.state",
    "TrainerState": "trainer_lib.state",
    "TrainingArguments": "trainer_lib.arguments",
    "WandbCallback": "trainer_lib.trackers.vendors",
    "default_compute_objective": "trainer_lib.search.base",
    "default_data_collator": "trainer_lib.data.collators",
    "default_hp_space_optuna": "trainer_lib.search.base",
    "default_hp_space_ray": "trainer_lib.search.backends",
    "enable_full_determinism": "trainer_lib.trainer.seeding",
    "get_last_checkpoint": "trainer_lib.checkpoint.catalogue",
    "install": "trainer_lib.installation",
    "load_model": "trainer_lib.model_folder.loaded",
    "set_seed": "trainer_lib.trainer.seeding",
    "uninstall": "trainer_lib.installation",
}

# Written out: type checkers and editors do not evaluate an expression.
__all__ = [
    "ArgumentParser",
    "AzureMLCallback",
    "BestRun",
    "CallbackHandler",
    "ClearMLCallback",
    "CodeCarbonCallback",
    "CometCallback",
    "DVCLiveCallback",
    "DagsHubCallback",
    "DataCollator",
    "DataCollatorForLanguageModeling",
    "DataCollatorForMultipleChoice",
    "DataCollatorForPermutationLanguageModeling",
    "DataCollatorForSeq2Seq",
    "DataCollatorForTokenClassification",
    "DataCollatorWithFlattening",
    "DataCollatorWithPadding",
    "DefaultDataCollator",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "EvalLoopOutput",
    "EvalPrediction",
    "ExportableState",
    "FlyteCallback",
    "HPSearchBackend",
    "HfArgumentParser",
    "HubStrategy",
    "IntervalStrategy",
    "JsonlCallback",
    "KubeflowCallback",
    "LoadedModel",
    "MLflowCallback",
    "ModelOutput",
    "NeptuneCallback",
    "OptimizerNames",
    "PredictionOutput",
    "PrinterCallback",
    "ProgressCallback",
    "SaveStrategy",
    "SchedulerType",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "SwanLabCallback",
    "TFTrainer",
    "TFTrainingArguments",
    "TensorBoardCallback",
    "TrackioCallback",
    "TrainOutput",
    "Trainer",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "TrainingArguments",
    "WandbCallback",
    "default_compute_objective",
    "default_data_collator",
    "default_hp_space_optuna",
    "default_hp_space_ray",
    "enable_full_determinism",
    "get_last_checkpoint",
    "install",
    "load_model",
    "set_seed",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module and keep it (PEP 562).

    Raises:
        AttributeError: the name is not a public one.
    """
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
