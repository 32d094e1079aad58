"""Train LoRA adapters of a tiny Llama on the standard library's docstrings, offline.

Written for the Trainer of transformers; only the import line was changed. Run it with

    python examples/causal_lm_lora/train.py --output_dir out/lora

Nothing is downloaded, so the base model has random weights; embeddings and head are therefore trained as well.
"""

import argparse
import ast
import math
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trainer_lib import Trainer, TrainingArguments, set_seed

BLOCK = 64


def read_docstrings() -> list[str]:
    """Docstrings of the first sixty modules in the standard library's top folder."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        texts += [text for text in docstrings if text and len(text) > 40]
    return texts


def build_tokenizer(texts: list[str]) -> Any:
    """Learn a byte-level vocabulary of 1,024 tokens from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    settings: dict[str, Any] = {
        "special_tokens": ["<pad>", "<s>", "</s>"],
        "initial_alphabet": alphabet,
        "show_progress": False,
    }
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1024, **settings))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=BLOCK
    )


def build_base(tokenizer: Any) -> LlamaForCausalLM:
    """Build the base model; its random weights are equal at every call."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train adapters, evaluate, save, load what was saved and generate with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out/causal_lm_lora")
    parser.add_argument("--max_steps", type=int, default=300)
    options = parser.parse_args()

    texts = read_docstrings()
    tokenizer = build_tokenizer(texts)
    data = Dataset.from_dict({"text": [text + tokenizer.eos_token for text in texts]})
    data = data.map(
        lambda batch: tokenizer(batch["text"], truncation=True), batched=True, remove_columns=["text"]
    ).train_test_split(test_size=0.1, seed=0)

    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
    )
    model = get_peft_model(build_base(tokenizer), lora)
    model.print_trainable_parameters()

    training_args = TrainingArguments(
        output_dir=options.output_dir,
        overwrite_output_dir=True,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=options.max_steps,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        eval_strategy="steps",
        eval_steps=100,
        save_steps=100,
        save_total_limit=1,
        load_best_model_at_end=True,
        logging_steps=50,
        include_num_input_tokens_seen="non_padding",
        report_to="none",
        disable_tqdm=not sys.stdout.isatty(),
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    before = trainer.evaluate()
    trainer.train()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_model()
    print(f"perplexity {math.exp(before['eval_loss']):.0f} -> {math.exp(metrics['eval_loss']):.0f}")

    # What was saved is an ordinary adapter of peft, which needs the base model that it was trained on.
    loaded = PeftModel.from_pretrained(build_base(tokenizer), options.output_dir).eval()
    prompt = tokenizer("Return the", return_tensors="pt")
    with torch.no_grad():
        written = loaded.generate(input_ids=prompt["input_ids"], max_new_tokens=20, do_sample=False)
    print(repr(tokenizer.decode(written[0])))


if __name__ == "__main__":
    main()
