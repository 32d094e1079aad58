"""FSDP's own configuration: read and checked."""
