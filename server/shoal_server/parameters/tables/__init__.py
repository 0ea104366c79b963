"""Tables of rows by id: embeddings. A step touches few of a table's rows."""
