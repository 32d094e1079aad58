"""MLflow's loader of a model that was trained here: `mlflow.pyfunc.load_model`, `mlflow models serve` and `predict`.

The artifacts of a LoggedModel have the description and the code; the weights are read from where training committed
them, and every byte is compared with its SHA-256. Nothing is unpickled. As with every model of MLflow, loading it
executes code that lies among its artifacts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer_lib.base.json_text import read_json
from trainer_lib.data.rows.given_rows import known_columns
from trainer_lib.errors import DamagedError, DataError
from trainer_lib.model_folder.locate import PIN, find_model, require_weights

if TYPE_CHECKING:
    import pandas as pd

    from trainer_lib.model_folder.loaded import LoadedModel


class PyfuncModel:
    """A model as `mlflow.pyfunc` calls it."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Predict the rows of a data frame, of a list of mappings, or of a mapping to arrays ``[batch, …]``.

        Returns:
            A data frame with the columns of the predict stage; arrays are lists.

        Raises:
            MlflowException: a row does not fit; with status 400, so that a server answers with the sentence.
        """
        import pandas as pd

        given = [model_input] if isinstance(model_input, Mapping) else model_input
        frame = given if isinstance(given, pd.DataFrame) else pd.DataFrame(given)
        columns = {str(name): [_plain(value) for value in frame[name]] for name in frame.columns}
        try:
            rows = self._rows_of(columns)
            if not columns:  # MLflow leaves out those that it does not know
                known = ", ".join(known_columns(self.model.description.columns))
                raise DataError(f"The rows have none of the columns {known}.", remedy="Check the names.")
            predicted = self.model.predict(rows)
        except DataError as error:
            from trainer_lib.trackers.mlflow.mlflow_models import bad_request

            raise bad_request(str(error)) from error
        return pd.DataFrame({name: [_plain(value) for value in values] for name, values in predicted.items()})

    def _rows_of(self, columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
        """The rows of columns. Of arrays ``[batch, …]`` MLflow makes one row, with values of a dimension too many."""
        known = known_columns(self.model.description.columns)
        too_deep = [
            len(values) == 1 and _depth(values[0]) == (known[name].kind == "list") + len(known[name].shape) + 1
            for name, values in columns.items()
            if name in known
        ]
        if too_deep and all(too_deep):
            columns = {name: values[0] if isinstance(values[0], list) else values for name, values in columns.items()}
        if len({len(values) for values in columns.values()}) > 1:
            what = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
            raise DataError(f"The columns have different numbers of rows: {what}.", remedy="Give arrays [batch, …].")
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _depth(value: Any) -> int:
    """Dimensions of a list, whose elements may differ in length."""
    return 1 + _depth(value[0] if value else None) if isinstance(value, list | tuple) else 0


def _load_pyfunc(path: str) -> PyfuncModel:
    """Load the model described in a folder; MLflow calls this."""
    from trainer_lib.model_folder.loaded import load_model

    found = find_model(path)
    require_weights(found)
    pinned = read_json(Path(path) / PIN, dict)
    if found.digest() != pinned["digest"]:
        what, remedy = "The model is not the one that was logged.", "Register the model again, or restore its files."
        raise DamagedError(what, field="model", value=found.weights.url, remedy=remedy)
    return PyfuncModel(load_model(path, trust_code=found.description.code_digest))


def _plain(value: Any) -> Any:
    """An array as a list; NumPy's numbers as Python's; None for pandas' missing values."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return None if type(value).__name__ in ("NAType", "NaTType") else value
