"""Arguments that are mappings or files: the configurations of accelerate, DeepSpeed and FSDP."""
