"""trainflow from Python: the commands of the terminal as objects. Importing it imports neither Prefect nor torch.

    import trainflow

    spec = trainflow.Spec.load("pipeline.yaml", "train.args.learning_rate=1e-3")
    run = spec.run()
    run.metrics
    run.load_model().predict([{"image": image}])

Stages for flows of your own are in `trainflow.tasks`, the Trainer is in `trainer_lib`.
"""

from trainer_lib.base.public_names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
