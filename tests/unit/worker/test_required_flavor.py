"""A model that could not be registered as the spec says is refused before its training."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import bert
from trainer_lib.errors import ConfigError
from trainer_lib.worker.train import require_flavor


def test_a_model_of_transformers_passes_and_others_only_where_nothing_is_required() -> None:
    require_flavor(bert(), "transformers")
    require_flavor(torch.nn.Linear(1, 1), None)
    with pytest.raises(ConfigError, match=r"returned a Linear, which is not a model of transformers"):
        require_flavor(torch.nn.Linear(1, 1), "transformers")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # of peft
def test_an_adapter_is_refused_in_words() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(bert(), peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(ConfigError, match="which is an adapter"):
        require_flavor(adapted, "transformers")
