"""The public names of trainflow by their modules: the one list, for type checkers, editors and `__init__.py`."""

from trainer_lib.errors import TrainflowError as TrainflowError
from trainer_lib.model_folder.loaded import load_model as load_model
from trainflow.objects import Run as Run, Spec as Spec, runs as runs

__all__: list[str]
