"""Requests of the orchestrator and answers of workers: a request and a result for every verb.

::

    launch(TrainRequest(...), config) -> TrainResult
        request.json                       what the run directory and, on several machines, the rendezvous carry
        trainer_lib.worker.train.run(Work[TrainRequest]) -> TrainResult
        result.json                        written by rank 0

Both ends import this, and it imports neither torch nor pydantic. Secrets go to the workers as environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from typing_extensions import override

from trainer_lib.base.metric_names import Benchmark, MetricCall
from trainer_lib.base.paths import PathOptions
from trainer_lib.base.records import from_record, to_record
from trainer_lib.data.rows.row_sources import RowFile
from trainer_lib.errors import ConfigError
from trainer_lib.protocol.footprint import Estimate, Probe
from trainer_lib.storage import FileEntry

FORMAT = 1  # raised when a request changes its meaning: the machines of one training must run the same version


OUTCOMES = "outcomes"  # folder in the result of evaluate: what the model got right and wrong, JSON files by split
MIXTURE_CHANGE = "mixture.json"
"""File in the folder of a training with weights of sources that it is to have from its next save on."""
STATISTICS = "statistics.json"
"""File in the result of prepare-data by sources: split -> column -> statistics (`data.statistics`)."""


@dataclass(frozen=True)
class PreparedSplit:
    """One split as prepare-data leaves it."""

    rows: int
    shards: tuple[str, ...] = ()  # paths of its Arrow files below the stage's folder, in the order of the rows
    columns: dict[str, str] = field(default_factory=dict)  # names of columns -> their types
    lengths: tuple[int, ...] = ()  # rows of the files; empty: all but the last have as many as the first


@dataclass(frozen=True)
class PrepareResult:
    """Files written, the splits they hold, what the recipe notes for its model, and what may be wrong with the rows."""

    files: tuple[FileEntry, ...]
    splits: dict[str, PreparedSplit]
    info: dict[str, Any]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """Facts of a finished training."""

    # global_step, global_samples: optimizer steps and training samples, those before a resume included.
    global_step: int | None = None
    global_samples: int | None = None
    world_size: int | None = None  # processes of the attempt that finished
    resumed_from: int | None = None  # optimizer step that the attempt continued from; None: it began at the start
    checkpoints: tuple[str, ...] = ()  # names of the committed checkpoints, newest first
    parameters: int | None = None  # number of the model's parameters
    peak_bytes: int | None = None  # the largest memory of a process (`trainer_lib.base.memory.read_peak_bytes`)
    device: str | None = None  # what the processes trained on, as its driver names it
    # Model FLOPs utilization of the last attempt, from 0 to 1; None where the device's peak is not known.
    mfu: float | None = None
    micro_batch: int | None = None  # samples that a process was allowed at a time in the end; a step may have had fewer
    # Weights of sources that were changed while training: `step` and `weights` of each change.
    mixture: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TrainResult(Trained):
    """A finished training, the files of the exported model below `model/`, and metrics as the Trainer returns them."""

    files: tuple[FileEntry, ...]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class EvaluateResult:
    """Files written, and the metrics: split -> name -> value; `warnings` are sentences about what may be wrong."""

    files: tuple[FileEntry, ...]
    metrics: dict[str, dict[str, float]]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckpointMetrics:
    """Metrics of a checkpoint's evaluation, by the names that the Trainer logs (`eval_loss`), and its step."""

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class PartsResult:
    """A worker's share: files that it wrote, and rows in them; others may have written the rest."""

    parts: int
    rows: int


@dataclass(frozen=True)
class MergeResult:
    """The merged model, and how far its weights answer as the adapters do; empty where no rows give logits."""

    files: tuple[FileEntry, ...]
    agreement: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeFile:
    """A recipe's Python file, the folder where its imports start, and the file of functions that it lacks."""

    path: str
    root: str
    fallback: str | None = None


@dataclass(frozen=True)
class PreparedData:
    """Prepared data as a request carries it: where it lies, what it is, and every file with its digest."""

    url: str
    splits: dict[str, PreparedSplit]
    info: dict[str, Any]
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class Proof:
    """The end of a training of `trainflow prove-resume`: a signal after a step, SIGKILL if `kill`; None: none."""

    stop_at: int | None = None
    kill: bool = False


@dataclass(frozen=True)
class Preemption:
    """Where a notice is looked for: a file that exists, a command that exits with 0, or a URL that answers 200."""

    file: str | None = None
    command: tuple[str, ...] = ()
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)  # sent with the request
    contains: str | None = None  # text that the answer must contain; None: any answer counts
    every_s: float = 5.0  # seconds between two looks
    timeout_s: float = 2.0  # seconds that the command or the URL may take


@dataclass(frozen=True)
class StopEarly:
    """Evaluations in a row without an improvement by more than the threshold, after which a training ends."""

    patience: int
    threshold: float = 0.0


R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Request(Generic[R]):
    """The base of all requests."""

    verb: ClassVar[str]
    result: ClassVar[type[Any]]
    functions: ClassVar[tuple[str, ...]] = ("build_model",)  # functions that the recipe must define for this verb
    by_verb: ClassVar[dict[str, type[Request[Any]]]] = {}
    home: ClassVar[str] = "trainer_lib.worker"  # the package that has the verb's module
    uses_devices: ClassVar[bool] = False  # whether the worker puts a model on the devices of its machine

    output: str  # folder or URL to write to
    recipe: RecipeFile | None = None  # whose functions are called; None: the verb needs none
    options: dict[str, Any] = field(default_factory=dict)  # the recipe's own settings of this stage
    paths: PathOptions | None = None  # which of them, and of the model's settings, are paths; None: none
    tracking: bool = False  # whether the environment names an MLflow run to add points to
    debug: bool = False  # keep the files of the run

    def __init_subclass__(cls, *, verb: str | None = None, result: type[Any] | None = None, **options: Any) -> None:
        """Remember the class as the request of `verb`, which `result` answers."""
        super().__init_subclass__(**options)
        if verb is not None and result is not None:
            cls.verb, cls.result = verb, result
            # Collected as classes are defined, so that no table has to list them.
            Request.by_verb[verb] = cls

    @property
    def use_cpu(self) -> bool:
        """Whether the worker uses the CPU although there are devices."""
        return False

    def recipe_options(self) -> dict[str, Any]:
        """The options as the recipe gets them: declared paths are absolute `pathlib.Path`s."""
        return self.options if self.paths is None else self.paths.resolved(self.options, self.paths.options)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data; `read_request` is the inverse."""
        return {"format": FORMAT, "verb": self.verb, **to_record(self)}

    def read_result(self, record: object) -> R:
        """The worker's answer from plain JSON data. Raises ConfigError for that of another version."""
        result: R = from_record(self.result, record, name="result.json")
        return result


@dataclass(frozen=True, kw_only=True)
class PrepareRequest(Request[PrepareResult], verb="prepare", result=PrepareResult):
    """Write the recipe's rows as shards."""

    functions: ClassVar[tuple[str, ...]] = ("prepare",)
    shard_rows: int = 10_000  # rows of a shard
    allow_nan: bool = False  # accept NaN and infinite values
    sources: tuple[str, ...] = ()  # what the data is made from; local paths are absolute
    limit: int | None = None  # rows of each split (of each source, where there are several) that are written; None: all
    step: str = "all"  # which of `worker.prepare` is done; a recipe with `prepare` has one
    mixture: tuple[str, ...] = ()  # names of the sources of a mixture, in their order; empty: there is none


@dataclass(frozen=True, kw_only=True)
class ModelRequest(Request[R], Generic[R]):
    """The common part of training, evaluation and prediction."""

    uses_devices: ClassVar[bool] = True
    data: PreparedData
    model: dict[str, Any] = field(default_factory=dict)  # settings that build_model is given
    args: dict[str, Any] = field(default_factory=dict)  # training arguments by name
    # Those that the spec asks for, measured by evaluations in addition to those of compute_metrics.
    metrics: tuple[MetricCall, ...] = ()

    def model_options(self) -> dict[str, Any]:
        """The model's settings as build_model gets them: declared paths are absolute `pathlib.Path`s."""
        return self.model if self.paths is None else self.paths.resolved(self.model, self.paths.model)

    @property
    def use_cpu(self) -> bool:
        """Whether the worker uses the CPU although there are devices."""
        # As text, because a request holds the arguments as they were given.
        return str(self.args.get("use_cpu", "")).lower() in ("true", "1", "yes")


@dataclass(frozen=True, kw_only=True)
class TrainRequest(ModelRequest[TrainResult], verb="train", result=TrainResult):
    """Train from the newest good checkpoint in `output`, or from the start, and export the model."""

    train_split: str = "train"
    eval_split: str | None = None  # evaluated while training; None: none
    # proof, flavor: of a training that is part of a proof; the library that the model must be of ("transformers").
    proof: Proof | None = None
    flavor: str | None = None
    preemption: Preemption | None = None  # where to look for notice that the machine goes; None: nowhere
    stop_early: StopEarly | None = None  # when a training ends that no longer improves; None: never


@dataclass(frozen=True, kw_only=True)
class EstimateRequest(ModelRequest[Estimate], verb="estimate", result=Estimate):
    """Work out what training by so many processes would take, on fake tensors."""

    uses_devices: ClassVar[bool] = False

    train_split: str = "train"
    eval_split: str | None = None
    processes: int = 1


@dataclass(frozen=True, kw_only=True)
class ProbeRequest(ModelRequest[Probe], verb="probe", result=Probe):
    """Train with the clock running, and evaluate `rows` rows at most; `output` is a folder that the owner removes."""

    train_split: str = "train"
    eval_split: str | None = None
    rows: int = 512


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(ModelRequest[EvaluateResult], verb="evaluate", result=EvaluateResult):
    """Measure the model at `model_url` on the splits; a rehearsal tries the measures without a trained model."""

    model_url: str
    splits: tuple[str, ...]
    resamples: int = 0
    confidence: float | None = None
    slices: tuple[str, ...] = ()
    show_inputs: bool = True
    importance_seconds: float = 10.0
    benchmarks: tuple[Benchmark, ...] = ()
    is_rehearsal: bool = False
    named: dict[str, str] = field(default_factory=dict)
    """Setting -> the metric, ``<split>_<name>`` or training's ``eval_<name>``, that it needs; for a rehearsal."""


@dataclass(frozen=True, kw_only=True)
class EvaluateCheckpointRequest(ModelRequest[CheckpointMetrics], verb="evaluate_checkpoint", result=CheckpointMetrics):
    """Measure the checkpoint at the URL `checkpoint` as an evaluation inside its training does."""

    checkpoint: str
    eval_split: str
    train_split: str = "train"


@dataclass(frozen=True, kw_only=True)
class PredictRequest(ModelRequest[PartsResult], verb="predict", result=PartsResult):
    """Predict a split with the model exported at `model_url`."""

    model_url: str
    split: str
    rows_per_file: int = 10_000
    sort_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class MergeRequest(ModelRequest[MergeResult], verb="merge_adapters", result=MergeResult):
    """Merge the adapters exported at `model_url` into the weights of their base model."""

    uses_devices: ClassVar[bool] = False

    model_url: str
    dtype: str | None = None  # type of the merged weights; None: that of the base, bfloat16 of a quantized one
    tolerance: float = 1.0  # share of next tokens in which they may differ from the adapters, on the rows `prompts`
    prompts: int = 20


@dataclass(frozen=True, kw_only=True)
class FoundModelRequest(Request[R], Generic[R]):
    """The common part of requests about a model by its address."""

    functions: ClassVar[tuple[str, ...]] = ()
    home: ClassVar[str] = "trainer_lib.model_folder"

    model: str  # its address
    code: str  # SHA-256 of its code, which is trusted
    sources: tuple[RowFile, ...] = ()  # the files with rows for it, in their order
    is_on_cpu: bool = False  # it was trained on the CPU although there are devices

    @property
    @override
    def use_cpu(self) -> bool:
        return self.is_on_cpu


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """Settings of predictions of new rows, in files of a fixed number of rows."""

    # Column with the ids of the rows; None: `row_id` or `id` where the first row has it, else numbers.
    id_column: str | None = None
    ignored: tuple[str, ...] = ()  # columns that are not for the model
    # rows_per_file, file_format: rows of a file, and "parquet" or "jsonl".
    rows_per_file: int = 10_000
    file_format: str = "parquet"
    # Rows that may be bad: what is wrong with each goes into a column `error`. 0: no row, no column.
    max_errors: int = 0
    # batch_size, sort_by: rows of a forward pass (None: as while training), and what they share it by the length of.
    batch_size: int | None = None
    sort_by: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(RowSettings, FoundModelRequest[PartsResult], verb="score_rows", result=PartsResult):
    """Predict new rows with a trained model of this `digest`; `key` is a digest of all that decides the predictions."""

    uses_devices: ClassVar[bool] = True

    digest: str
    key: str


@dataclass(frozen=True)
class MeasureRowsResult:
    """Metrics of a model on labelled rows."""

    rows: int
    digest: str  # SHA-256 of the labels and what was read with them: two results of one digest are of the same rows
    metrics: dict[str, float]  # name -> value, and `<name>_low` and `<name>_high`
    resampled: dict[str, tuple[float, ...]]  # name -> its value on each resample, the same resamples for every model
    # As `summarize_outcomes` has them, with inputs; None where they were not asked for, or of another kind.
    outcomes: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class MeasureRowsRequest(FoundModelRequest[MeasureRowsResult], verb="measure_rows", result=MeasureRowsResult):
    """Measure a trained model on labelled rows."""

    uses_devices: ClassVar[bool] = True

    digest: str  # SHA-256 of the model
    # data, split: the prepared split with the rows in place of files; its own rows decide the resamples.
    data: PreparedData | None = None
    split: str = ""
    metrics: tuple[MetricCall, ...] = ()  # measured in addition to those of compute_metrics
    confidence: float = 0.95  # the probability that an interval holds its metric
    resamples: int = 1000  # of the rows, for intervals and comparisons
    wants_outcomes: bool = False  # return what a report shows of the rows


@dataclass(frozen=True)
class ExportResult:
    """Files of an exported model, and the greatest difference of its outputs of some rows, relative to the largest."""

    files: tuple[str, ...]
    rows: int
    apart: float


@dataclass(frozen=True, kw_only=True)
class ExportRequest(FoundModelRequest[ExportResult], verb="export_model", result=ExportResult):
    """Write a trained model for another program into the folder `output`.

    `form`: torch-export, onnx, transformers or gguf. Outputs are compared on rows of `sources`; none: at random.
    """

    form: str


@dataclass(frozen=True)
class CompareResult:
    """Differences between two trainings in the order of time, and what was compared (counts by name)."""

    differences: tuple[dict[str, Any], ...]
    compared: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CompareRequest(Request[CompareResult], verb="compare", result=CompareResult):
    """Compare the checkpoints of two trainings, below their URLs."""

    whole: str
    resumed: str


@dataclass(frozen=True)
class ImportResult:
    """A checkpoint committed at `url`: its parameters with optimizer state, the number of its files and their bytes.

    `left_out` are names in the source folder that were not imported; `notes` say what differs after resuming.
    """

    step: int
    url: str
    parameters: int
    files: int
    bytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ImportRequest(Request[ImportResult], verb="import_checkpoint", result=ImportResult):
    """Commit a checkpoint of the transformers Trainer, the folder at `source`, in our format.

    `model`: function of the recipe that returns the model as it was trained.
    """

    functions: ClassVar[tuple[str, ...]] = ()

    source: str
    model: str


def read_request(record: object) -> Request[Any]:
    """A request from plain JSON data. Raises ConfigError for another format, verb, or type of a field."""
    # The format first: fields of another format would be refused for the wrong reason.
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        remedy = "Use the same version of trainflow for the command and its workers."
        raise ConfigError(f"This is not a request of format {FORMAT}.", field="request.json", remedy=remedy)
    verb = record.get("verb")
    kind = Request.by_verb.get(str(verb))
    if kind is None:
        known = ", ".join(Request.by_verb)
        raise ConfigError("The worker has no such verb.", field="verb", value=verb, remedy=f"Use one of {known}.")
    fields = {name: value for name, value in record.items() if name not in ("format", "verb")}
    return from_record(kind, fields, name=kind.verb)
