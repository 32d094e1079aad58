"""Checkpoints: committed or absent, on any store, without pickle.

::

    checkpoint-<step>/
        model.safetensors        weights and buffers; loads with safetensors as it is
        optimizer.safetensors    its tensors, named <parameter>/<key>
        optimizer.json           its groups and everything that is not a tensor, by parameter name
        scheduler.json scaler.json data.json trainer_state.json training_args.json
        rng/rank-00000.json      one per rank
        extra/rank-00000.safetensors    tensors of callbacks and of `past_index`, where there are any
        shards/rank-00000.safetensors, shards.json    instead of the two .safetensors above, of a model that is divided
                                 over processes: each one's rows of both, and where the rows of every tensor are
        config.json, ...         what makes the model usable elsewhere
        COMMIT.json              last: the checkpoint exists from here on

`catalogue` finds, verifies and removes them and imports no torch; `writer` and `reader` write and read them;
`tensors`, `sharded`, `optimizer` and `rng` know the formats; `foreign` recognises other programs' folders, `importing`
(with `torch_files` and `parameters`) reads those of the transformers Trainer. Import from those modules: this one stays
empty, for torch's sake.
"""
