"""How MLflow loads a model that was trained here: `mlflow.pyfunc.load_model`, `mlflow models serve` and `predict`.

The artifacts of a LoggedModel have the description and the code; the weights are read from where training committed
them, and every byte is compared with its SHA-256. Nothing is unpickled. As with every model of MLflow, loading it
executes code that lies among its artifacts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer_lib.data.given_rows import known_columns
from trainer_lib.errors import DamagedError, DataError
from trainer_lib.json_text import read_json
from trainer_lib.model_folder.locate import PIN, find_model, require_weights

if TYPE_CHECKING:
    import pandas as pd

    from trainer_lib.model_folder.loaded import LoadedModel


class PyfuncModel:
    """A model as `mlflow.pyfunc` calls it."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Predict the rows of a data frame, or of a list of mappings.

        Returns:
            A data frame with the columns of the predict stage; arrays are lists.

        Raises:
            MlflowException: a row does not fit; with status 400, so that a server answers with the sentence.
        """
        import pandas as pd

        frame = model_input if isinstance(model_input, pd.DataFrame) else pd.DataFrame(model_input)
        columns = {str(name): [_plain(value) for value in frame[name]] for name in frame.columns}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        try:
            if not columns:  # MLflow leaves out those that it does not know
                known = ", ".join(known_columns(self.model.description.columns))
                raise DataError(f"The rows have none of the columns {known}.", remedy="Check the names.")
            predicted = self.model.predict(rows)
        except DataError as error:
            from trainer_lib.trackers.mlflow_models import bad_request

            raise bad_request(str(error)) from error
        return pd.DataFrame({name: [_plain(value) for value in values] for name, values in predicted.items()})


def _load_pyfunc(path: str) -> PyfuncModel:
    """Load the model described in a folder; MLflow calls this."""
    from trainer_lib.model_folder.loaded import load_model

    found = find_model(path)
    require_weights(found)
    pinned = read_json(Path(path) / PIN, dict)
    if found.digest() != pinned["digest"]:
        raise DamagedError(
            "The model is not the one that was logged.",
            field="model",
            value=found.weights.url,
            remedy="Register the model again, or restore its files.",
        )
    return PyfuncModel(load_model(path, trust_code=found.description.code_digest))


def _plain(value: Any) -> Any:
    """An array as a list; NumPy's numbers as Python's."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
