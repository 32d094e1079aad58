"""Tables of files: cells, columns, rows, splits and series."""
