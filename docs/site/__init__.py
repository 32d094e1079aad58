"""The documentation site: `python -m docs.site` gathers the pages and the reference, and Zensical renders them."""
