"""A script of code from outside under a real torchrun: what libraries ask of accelerate beside the Trainer."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.distributed.test_launch_scripts import run

# Written as for transformers' Trainer; the Trainer's import is the only difference.
SCRIPT = """
import json, os, torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object, set_seed
from tests.support.toys import Classifier, classification_rows
from trainer_lib import Trainer, TrainingArguments

state = PartialState()  # before anything of the Trainer, as data scripts do
rows = classification_rows(13)

class Pairs(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        nested = {"loss": loss.detach(), "rows": [outputs["logits"].detach(), (inputs["labels"],)]}
        gathered = self.accelerator.gather_for_metrics(nested)
        self.counted = getattr(self, "counted", []) + [len(gathered["rows"][1][0])]
        return (loss, outputs) if return_outputs else loss

    def own_evaluation(self):
        labels, names = [], []
        model = self.accelerator.unwrap_model(self.model_wrapped).eval()
        for batch in self.get_eval_dataloader():
            with torch.no_grad(), self.accelerator.autocast():
                model(**self._prepare_inputs(batch))
            labels += self.accelerator.gather_for_metrics(batch["labels"]).tolist()
            names += self.accelerator.gather_for_metrics([str(label) for label in batch["labels"].tolist()])
        return labels, names

args = TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=2, per_device_eval_batch_size=6,
                         use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no")
trainer = Pairs(Classifier(), args, train_dataset=rows, eval_dataset=rows)
get_logger(__name__, log_level="INFO").info("accelerate's logger needs its state", main_process_only=True)
trainer.train()
trained = sum(trainer.counted)
loss = trainer.evaluate()["eval_loss"]
labels, names = trainer.own_evaluation()
assert isinstance(trainer.accelerator, Accelerator)
with state.main_process_first():
    ready = True
found = gather_object([state.process_index])  # accelerate's own function
seen = [state.process_index, state.num_processes, AcceleratorState().num_processes, found, trained, len(labels)]
seen += [names == [str(label) for label in labels], labels == [int(row["labels"]) for row in rows], round(loss, 6)]
state.wait_for_everyone()
os.write(1, ("seen " + json.dumps(seen) + chr(10)).encode())
"""


def test_code_from_outside_gathers_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--log-dir", str(tmp_path / "logs")]
    zero, one = run(tmp_path, [*torchrun, "--nproc-per-node", "2", "script.py"])
    assert (zero.pop(0), one.pop(0)) == (0, 1)
    assert zero == one
    assert zero[:-1] == [2, 2, [0, 1], 13, 13, True, True]
