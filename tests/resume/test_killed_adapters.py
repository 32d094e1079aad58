"""SIGKILL, twice, to a training of adapters on 4-bit weights, packed and with dropout: it exports the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tests.support.named_recipes import prepare_sources, save_base
from trainer_lib.errors import InfrastructureError
from trainer_lib.protocol.recipe_names import recipe_file
from trainer_lib.protocol.requests import PreparedData, PrepareRequest, Proof, RecipeFile, TrainRequest
from trainer_lib.worker.process.assembly import BASE


@pytest.mark.needs("bitsandbytes")
@pytest.mark.timeout(300)
def test_a_packed_training_on_4_bits_that_is_killed_twice_exports_the_same_adapters(
    tmp_path: Path,
) -> None:
    rows = "".join(json.dumps({"prompt": f"say {n}", "completion": f"{n} {n}"}) + "\n" for n in range(60))
    (tmp_path / "chats.jsonl").write_text(rows)
    name, sources = "supervised-fine-tuning", (str(tmp_path / "chats.jsonl"),)
    usual = {"length": 96, "overlong": "cut", "split": {"validation": 0.1, "test": 0.1}}
    (tmp_path / "first").mkdir()
    base = save_base(
        prepare_sources(name, sources, {**usual, "vocabulary": 300}, tmp_path / "first"), tmp_path / "base"
    )
    recipe, options = RecipeFile(str(recipe_file(name)), str(tmp_path)), {**usual, "folder": str(base)}
    made = tiny.run(
        PrepareRequest(output=str(tmp_path / "data"), recipe=recipe, sources=sources, options=options),
        kind="in_process",
    )
    data = PreparedData(str(tmp_path / "data"), made.splits, made.info, made.files)
    args = {"max_steps": 9, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "global_batch_size": 2}

    def train(folder: str, kill: int | None = None) -> Any:
        request = TrainRequest(
            output=str(tmp_path / folder),
            recipe=recipe,
            data=data,
            model={"folder": str(base), "load_in": "4bit", "adapter": {"rank": 2, "dropout": 0.2}},
            args={**args, "learning_rate": 1e-2, "use_cpu": True},
            eval_split="validation",
            proof=None if kill is None else Proof(kill, kill=True),
        )
        return tiny.run(request)

    whole = {entry.path: entry.sha256 for entry in train("whole").files}
    for step in (3, 7):
        with pytest.raises(InfrastructureError, match="killed by SIGKILL"):
            train("killed", kill=step)
    ended = train("killed")
    assert ended.resumed_from == 6
    assert {entry.path: entry.sha256 for entry in ended.files} == whole
    assert {"model/adapter_model.safetensors", f"model/{BASE}"} <= whole.keys()
    assert "model/model.safetensors" not in whole
