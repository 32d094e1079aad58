"""The public names of trainer_lib by their modules: the one list, for type checkers, editors and `__init__.py`."""

from transformers import (
    DataCollatorForMultipleChoice as DataCollatorForMultipleChoice,
    DataCollatorForPermutationLanguageModeling as DataCollatorForPermutationLanguageModeling,
    DataCollatorForTokenClassification as DataCollatorForTokenClassification,
    DataCollatorWithFlattening as DataCollatorWithFlattening,
)
from transformers.integrations.integration_utils import (
    AzureMLCallback as AzureMLCallback,
    ClearMLCallback as ClearMLCallback,
    CodeCarbonCallback as CodeCarbonCallback,
    CometCallback as CometCallback,
    DagsHubCallback as DagsHubCallback,
    DVCLiveCallback as DVCLiveCallback,
    FlyteCallback as FlyteCallback,
    KubeflowCallback as KubeflowCallback,
    NeptuneCallback as NeptuneCallback,
    SwanLabCallback as SwanLabCallback,
    TrackioCallback as TrackioCallback,
    WandbCallback as WandbCallback,
)

from trainer_lib.arguments import (
    ArgumentParser as ArgumentParser,
    HfArgumentParser as HfArgumentParser,
    HubStrategy as HubStrategy,
    IntervalStrategy as IntervalStrategy,
    OptimizerNames as OptimizerNames,
    SaveStrategy as SaveStrategy,
    SchedulerType as SchedulerType,
    Seq2SeqTrainingArguments as Seq2SeqTrainingArguments,
    TFTrainingArguments as TFTrainingArguments,
    TrainingArguments as TrainingArguments,
)
from trainer_lib.arguments.enums import HPSearchBackend as HPSearchBackend
from trainer_lib.base.outputs import (
    BestRun as BestRun,
    EvalLoopOutput as EvalLoopOutput,
    EvalPrediction as EvalPrediction,
    ModelOutput as ModelOutput,
    PredictionOutput as PredictionOutput,
    TrainOutput as TrainOutput,
)
from trainer_lib.callbacks.base import (
    CallbackHandler as CallbackHandler,
    DefaultFlowCallback as DefaultFlowCallback,
    EarlyStoppingCallback as EarlyStoppingCallback,
    PrinterCallback as PrinterCallback,
    ProgressCallback as ProgressCallback,
    TrainerCallback as TrainerCallback,
)
from trainer_lib.checkpoint.catalogue import get_last_checkpoint as get_last_checkpoint
from trainer_lib.data.loading.collators import (
    DataCollator as DataCollator,
    DataCollatorForSeq2Seq as DataCollatorForSeq2Seq,
    DataCollatorWithPadding as DataCollatorWithPadding,
    DefaultDataCollator as DefaultDataCollator,
    default_data_collator as default_data_collator,
)
from trainer_lib.data.loading.collators import DataCollatorForLanguageModeling as DataCollatorForLanguageModeling
from trainer_lib.installation import install as install, uninstall as uninstall
from trainer_lib.keras_models.tf_trainer import TFTrainer as TFTrainer
from trainer_lib.model_folder.loaded import LoadedModel as LoadedModel, load_model as load_model
from trainer_lib.search.base import (
    default_compute_objective as default_compute_objective,
    default_hp_space_optuna as default_hp_space_optuna,
)
from trainer_lib.search.trials import default_hp_space_ray as default_hp_space_ray
from trainer_lib.state import (
    ExportableState as ExportableState,
    TrainerControl as TrainerControl,
    TrainerState as TrainerState,
)
from trainer_lib.trackers.vendors import (
    JsonlCallback as JsonlCallback,
    MLflowCallback as MLflowCallback,
    TensorBoardCallback as TensorBoardCallback,
)
from trainer_lib.trainer import Trainer as Trainer
from trainer_lib.trainer.model.seeding import enable_full_determinism as enable_full_determinism, set_seed as set_seed
from trainer_lib.trainer.seq2seq import Seq2SeqTrainer as Seq2SeqTrainer

__all__: list[str]
