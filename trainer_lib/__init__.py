"""A PyTorch trainer library, independent of any orchestrator. Importing it does not import torch.

`_MODULES` lists every public name by its module, which is imported when the name is first used. The imports under
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
    from trainer_lib.base.outputs import (
        BestRun,
        EvalLoopOutput,
        EvalPrediction,
        ModelOutput,
        PredictionOutput,
        TrainOutput,
    )
    from trainer_lib.callbacks.base import (
        CallbackHandler,
        DefaultFlowCallback,
        EarlyStoppingCallback,
        PrinterCallback,
        ProgressCallback,
        TrainerCallback,
    )
    from trainer_lib.checkpoint.catalogue import get_last_checkpoint
    from trainer_lib.data.loading.collators import (
        DataCollator,
        DataCollatorForMultipleChoice,
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        DefaultDataCollator,
        default_data_collator,
    )
    from trainer_lib.data.loading.masking import (
        DataCollatorForLanguageModeling,
        DataCollatorForPermutationLanguageModeling,
        DataCollatorWithFlattening,
    )
    from trainer_lib.installation import install, uninstall
    from trainer_lib.keras_models.tf_trainer import TFTrainer
    from trainer_lib.model_folder.loaded import LoadedModel, load_model
    from trainer_lib.search.base import default_compute_objective, default_hp_space_optuna
    from trainer_lib.search.trials import default_hp_space_ray
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
    from trainer_lib.trainer.model.seeding import enable_full_determinism, set_seed
    from trainer_lib.trainer.seq2seq import Seq2SeqTrainer

# Name -> module. Written out, because looking into a module would import torch.
_MODULES = {
    "trainer_lib.arguments": (
        "ArgumentParser HfArgumentParser HubStrategy IntervalStrategy OptimizerNames SaveStrategy SchedulerType "
        "Seq2SeqTrainingArguments TFTrainingArguments TrainingArguments"
    ),
    "trainer_lib.arguments.enums": "HPSearchBackend",
    "trainer_lib.callbacks.base": (
        "CallbackHandler DefaultFlowCallback EarlyStoppingCallback PrinterCallback ProgressCallback TrainerCallback"
    ),
    "trainer_lib.checkpoint.catalogue": "get_last_checkpoint",
    "trainer_lib.data.loading.collators": (
        "DataCollator DataCollatorForMultipleChoice DataCollatorForSeq2Seq DataCollatorForTokenClassification "
        "DataCollatorWithPadding DefaultDataCollator default_data_collator"
    ),
    "trainer_lib.data.loading.masking": (
        "DataCollatorForLanguageModeling DataCollatorForPermutationLanguageModeling DataCollatorWithFlattening"
    ),
    "trainer_lib.installation": "install uninstall",
    "trainer_lib.keras_models.tf_trainer": "TFTrainer",
    "trainer_lib.model_folder.loaded": "LoadedModel load_model",
    "trainer_lib.base.outputs": "BestRun EvalLoopOutput EvalPrediction ModelOutput PredictionOutput TrainOutput",
    "trainer_lib.search.trials": "default_hp_space_ray",
    "trainer_lib.search.base": "default_compute_objective default_hp_space_optuna",
    "trainer_lib.trainer.seq2seq": "Seq2SeqTrainer",
    "trainer_lib.state": "ExportableState TrainerControl TrainerState",
    "trainer_lib.trackers.vendors": (
        "AzureMLCallback ClearMLCallback CodeCarbonCallback CometCallback DVCLiveCallback DagsHubCallback "
        "FlyteCallback JsonlCallback KubeflowCallback MLflowCallback NeptuneCallback SwanLabCallback "
        "TensorBoardCallback TrackioCallback WandbCallback"
    ),
    "trainer_lib.trainer": "Trainer",
    "trainer_lib.trainer.model.seeding": "enable_full_determinism set_seed",
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names.split()}

# Written out: type checkers and editors do not evaluate an expression.
__all__ = ["ArgumentParser", "AzureMLCallback", "BestRun", "CallbackHandler", "ClearMLCallback"]
__all__ += ["CodeCarbonCallback", "CometCallback", "DVCLiveCallback", "DagsHubCallback", "DataCollator"]
__all__ += ["DataCollatorForLanguageModeling", "DataCollatorForMultipleChoice"]
__all__ += ["DataCollatorForPermutationLanguageModeling", "DataCollatorForSeq2Seq"]
__all__ += ["DataCollatorForTokenClassification", "DataCollatorWithFlattening", "DataCollatorWithPadding"]
__all__ += ["DefaultDataCollator", "DefaultFlowCallback", "EarlyStoppingCallback", "EvalLoopOutput"]
__all__ += ["EvalPrediction", "ExportableState", "FlyteCallback", "HPSearchBackend", "HfArgumentParser"]
__all__ += ["HubStrategy", "IntervalStrategy", "JsonlCallback", "KubeflowCallback", "LoadedModel"]
__all__ += ["MLflowCallback", "ModelOutput", "NeptuneCallback", "OptimizerNames", "PredictionOutput"]
__all__ += ["PrinterCallback", "ProgressCallback", "SaveStrategy", "SchedulerType", "Seq2SeqTrainer"]
__all__ += ["Seq2SeqTrainingArguments", "SwanLabCallback", "TFTrainer", "TFTrainingArguments"]
__all__ += ["TensorBoardCallback", "TrackioCallback", "TrainOutput", "Trainer", "TrainerCallback"]
__all__ += ["TrainerControl", "TrainerState", "TrainingArguments", "WandbCallback", "default_compute_objective"]
__all__ += ["default_data_collator", "default_hp_space_optuna", "default_hp_space_ray"]
__all__ += ["enable_full_determinism", "get_last_checkpoint", "install", "load_model", "set_seed", "uninstall"]


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
