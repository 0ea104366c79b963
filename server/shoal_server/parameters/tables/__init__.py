"""Tables of rows by id: embeddings, of which a step touches few."""
