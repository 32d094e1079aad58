"""The documentation site: `python -m docs.site` gathers the pages and the reference, and MkDocs renders them."""
