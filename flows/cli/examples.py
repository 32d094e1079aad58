"""The examples at the end of each command's `--help`."""

from __future__ import annotations

_EXAMPLES = {
    "run": """
        trainflow run pipeline.yaml
        trainflow run pipeline.yaml train.args.learning_rate=1e-3 storage=s3://bucket/project
        trainflow run pipeline.yaml --limit 50
        trainflow run pipeline.yaml --from-run 3fa9c1 --from evaluate""",
    "why": """
        trainflow why pipeline.yaml
        trainflow why pipeline.yaml train.args.learning_rate=1e-3 --json""",
    "ui": """
        trainflow ui pipeline.yaml
        trainflow ui --storage .trainflow --port 5000""",
    "init": """
        trainflow init wine
        trainflow init reviews --recipe text-classification""",
    "schema": "trainflow schema --to schema.json",
    "plan": """
        trainflow plan pipeline.yaml
        trainflow plan pipeline.yaml train.launch.processes=4 --probe""",
    "sweep": """
        trainflow sweep pipeline.yaml
        trainflow sweep pipeline.yaml sweep.trials=40 sweep.parallel=2""",
    "resume": """
        trainflow resume
        trainflow resume 3fa9c1
        trainflow resume --storage s3://bucket/project""",
    "prove-resume": """
        trainflow prove-resume pipeline.yaml --steps 40
        trainflow prove-resume pipeline.yaml --at 25 --kill""",
    "gc": """
        trainflow gc --keep 10
        trainflow gc --keep 10 --delete""",
    "status": """
        trainflow status
        trainflow status --storage s3://bucket/project --json
        trainflow status --watch""",
    "runs": """
        trainflow runs --sort -test_accuracy -n 5
        trainflow runs --since 7d --state failed
        trainflow runs --metric "test_accuracy>=0.9" --json""",
    "show": """
        trainflow show last
        trainflow show 3fa9c1 --all""",
    "compare": "trainflow compare 3fa9c1 last",
    "logs": """
        trainflow logs last
        trainflow logs last train --rank 1 --follow""",
    "tag": "trainflow tag last baseline",
    "sync": """
        trainflow sync pipeline.yaml
        trainflow sync --storage s3://bucket/project""",
    "serve": """
        trainflow serve pipeline.yaml --cron "0 3 * * *" --timezone Europe/Berlin
        trainflow serve pipeline.yaml --watch s3://bucket/scans --watch-every 5m""",
    "deploy": 'trainflow deploy pipeline.yaml --pool gpus --cron "0 3 * * *"',
    "watch": "trainflow watch s3://bucket/scans pipeline/digits --every 5m",
    "follow": "trainflow follow pipeline.yaml",
    "join": "trainflow join 10.0.0.1:29500 --processes 4",
    "predict": """
        trainflow predict .trainflow/runs/3fa9c1d2e4b50617 "new/*.csv" --to predictions
        trainflow predict models:/digits@champion new.parquet --to s3://bucket/out --workers 4""",
    "models": """
        trainflow models
        trainflow models pipeline.yaml --json""",
    "promote": "trainflow promote digits 4",
    "rollback": "trainflow rollback digits",
    "lineage": """
        trainflow lineage last
        trainflow lineage models:/digits@champion --json""",
    "verify": "trainflow verify .trainflow/hub/digits",
    "reproduce": "trainflow reproduce last",
    "checkpoints list": "trainflow checkpoints list s3://bucket/project",
    "checkpoints verify": "trainflow checkpoints verify .trainflow",
    "checkpoints prune": "trainflow checkpoints prune .trainflow --keep 2 --dry-run",
    "checkpoints import": "trainflow checkpoints import old/checkpoint-5000 s3://bucket/run",
}


def epilog(command: str) -> str:
    """The end of a command's help; each line is a paragraph, because others are joined."""
    return "\n\n".join(["Examples:", *(line.strip() for line in _EXAMPLES[command].strip().splitlines())])
